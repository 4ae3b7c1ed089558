"""The optimizer that a Trainer trains with under a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from accelerators import quiet, settings, wrap_all

from zerofit.core.strategy import OptimizerName
from zerofit.training.setup import trainer_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_training import Trained


@pytest.mark.parametrize(
    ("name", "kind"),
    [(OptimizerName.ADAMW, "AdamW"), (OptimizerName.ADAFACTOR, "Adafactor"), (OptimizerName.SGD, "SGD")],
)
def test_the_plans_optimizer_trains(name: OptimizerName, kind: str, train: Callable[..., Trained]) -> None:
    found = train({"optimizer": name}, (8, 1), arguments={"optim": "adagrad"})
    assert type(found.trainer.optimizer.optimizer).__name__ == kind
    assert found.numbers("learning_rate") == pytest.approx([0.1, 0.2 / 3, 0.1 / 3])


def wide_model() -> Any:
    """Return a model with matrices of more than the 4096 elements below which no state has 8 bits."""
    from transformers import BertConfig, BertForTokenClassification, set_seed

    set_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForTokenClassification(BertConfig(vocab_size=64, num_labels=3, **sizes))


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize(
    "name", [name for name in OptimizerName if name.partition("-8bit")[1] or "lion" in name]
)
def test_trainers_own_states_are_of_8_bits_but_for_embeddings(
    name: OptimizerName, train: Callable[..., Trained]
) -> None:
    import torch

    found = train({"optimizer": name}, (8, 1), make_model=wide_model, arguments={"max_steps": 1})
    optimizer, bert = found.trainer.optimizer.optimizer, found.trainer.model.bert
    matrix = bert.encoder.layer[0].intermediate.dense.weight
    embedding = bert.embeddings.word_embeddings.weight
    assert optimizer.state[matrix]["state1"].dtype is (torch.uint8 if "8bit" in name else torch.float32)
    assert optimizer.state[embedding]["state1"].dtype is torch.float32
    assert optimizer.is_paged is ("paged" in name)
    assert optimizer.param_groups[0]["betas"] == ((0.9, 0.99) if "lion" in name else (0.9, 0.999))
    assert any(line.startswith("Lion trains at") for line in found.changes.lines) is ("lion" in name)


def test_an_optimizer_that_the_script_hands_over_is_swapped(train: Callable[..., Trained]) -> None:
    import torch

    def optimizers(model: Any) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2)

    found = train({"optimizer": OptimizerName.SGD}, (8, 1), optimizers=optimizers)
    assert type(found.trainer.optimizer.optimizer).__name__ == "SGD"
    assert found.numbers("learning_rate") == [0.25, 0.25, 0.5]
    assert "the optimizer is torch's SGD; the script hands its Trainer torch's AdamW" in found.changes.lines


def making_its_own(base: Any) -> Any:
    """Return a Trainer of a script's own that makes its optimizer itself."""
    import torch

    class Making(base):
        def create_optimizer(self, *args: Any) -> Any:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.25)
            return self.optimizer

    return Making


def test_an_optimizer_that_the_scripts_trainer_makes_is_swapped(train: Callable[..., Trained]) -> None:
    from transformers import Trainer

    arguments = {"lr_scheduler_type": "constant"}
    plan = {"optimizer": OptimizerName.SGD}
    found = train(plan, (8, 1), base=making_its_own(Trainer), arguments=arguments)
    assert type(found.trainer.optimizer.optimizer).__name__ == "SGD"
    assert found.numbers("learning_rate") == [0.25] * 3
    assert (
        "the optimizer is torch's SGD; the script's create_optimizer() makes torch's AdamW"
        in found.changes.lines
    )


def test_an_optimizer_class_that_the_script_names_is_swapped(train: Callable[..., Trained]) -> None:
    """Trainer takes it before TrainingArguments.optim."""
    import torch
    from transformers import Trainer

    class Naming(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            named = (torch.optim.AdamW, {"lr": 0.25})
            super().__init__(*args, optimizer_cls_and_kwargs=named, **kwargs)

    plan, arguments = {"optimizer": OptimizerName.SGD}, {"lr_scheduler_type": "constant"}
    found = train(plan, (8, 1), base=Naming, arguments=arguments)
    assert type(found.trainer.optimizer.optimizer).__name__ == "SGD"
    assert found.numbers("learning_rate") == [0.25] * 3
    assert (
        "the optimizer is torch's SGD; the script's optimizer_cls_and_kwargs make torch's AdamW"
        in found.changes.lines
    )


class _Trainer:
    """What DeepSpeed's setup leaves of a Trainer: neither the script's optimizer nor its scheduler."""

    is_deepspeed_enabled = True

    def __init__(self, optimizer: Any, lr_scheduler: Any) -> None:
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.args = SimpleNamespace(optim="adamw_torch")

    def train(self, own: str | None = None) -> str:
        self.optimizer = self.lr_scheduler = None
        self.create_optimizer()
        self.lr_scheduler = own
        return self.create_scheduler()

    def create_optimizer(self) -> None:
        self.optimizer = self.optimizer or "Trainer's"

    def create_scheduler(self) -> str:
        self.lr_scheduler = self.lr_scheduler or "Trainer's"
        return self.lr_scheduler


@pytest.mark.parametrize(
    ("given", "own", "steps"),
    [
        ("the script's", None, "the script's"),
        ("the script's", "a subclass's", "a subclass's"),
        (None, None, "Trainer's"),
        (None, "a subclass's", "a subclass's"),
    ],
)
def test_under_deepspeed_the_scheduler_that_the_script_gives_steps_unless_there_is_another(
    given: str | None, own: str | None, steps: str
) -> None:
    import torch

    kind = type("Trainer", (_Trainer,), {})
    wrap_all(kind, trainer_optimizer.trainer_wrappers(kind, settings(uses_deepspeed=True), quiet()))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    trainer = kind(optimizer, given)
    assert trainer.train(own) == steps
    assert trainer.optimizer is optimizer


@pytest.mark.parametrize("name", [None, OptimizerName.SGD])
def test_a_trainer_makes_its_optimizer_as_before_once_it_has_trained(name: OptimizerName | None) -> None:
    made = []

    class Trained(_Trainer):
        def train(self, own: str | None = None) -> str:
            made.append(self.create_optimizer)
            return "trained"

    wanted = settings(uses_deepspeed=True, optimizer=name)
    wrap_all(Trained, trainer_optimizer.trainer_wrappers(Trained, wanted, quiet()))
    trainer = Trained(None, None)
    if name is None:  # set on the Trainer itself, and not taken away
        trainer.create_optimizer = lambda: None  # type: ignore[method-assign]
    before = vars(trainer).get("create_optimizer")
    assert trainer.train() == "trained"
    assert (before is made[0]) is (name is None)
    assert vars(trainer).get("create_optimizer") is before
