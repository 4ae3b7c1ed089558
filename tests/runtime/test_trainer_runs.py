"""Trainer trains the same under a plan as without it: in this process, on tiny models."""

from __future__ import annotations

import dataclasses
import runpy
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from accelerators import quiet, settings
from runs import SCRIPTS

from zerofit.errors import UserError
from zerofit.facts import Machine, Versions
from zerofit.plan import Plan, Topology
from zerofit.runtime.explicit import planned_arguments, planned_trainer
from zerofit.strategy import OptimizerName, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zerofit.runtime.changes import Changes

TOKENS = runpy.run_path(str(SCRIPTS / "token_trainer.py"))
FP32_TOLERANCE = 1e-5
"""Relative. Sums over a batch are rounded in another order."""
PLAN = Plan(
    strategy=Strategy(),
    topology=Topology(on_cpu=True),
    machine=Machine(gpus=(), num_cpu_cores=2, host_memory_bytes=1, host_memory_available_bytes=1),
    versions=Versions(python="3.11", zerofit="0"),
)
SPLIT = {"micro_batch_size": 3, "trainer_accumulates": False}
PIECES = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}


@dataclasses.dataclass(kw_only=True)
class Trained:
    """What a run did."""

    log: list[dict[str, float]]
    """Losses, gradient norms and learning rates, and the evaluations."""
    events: Counter[str]
    """How often each event of a callback came."""
    samples: list[set[tuple[int, ...]]]
    """Samples of each optimizer step, told by their tokens."""
    sizes: set[int]
    """Samples of each forward pass in training."""
    trainer: Any
    changes: Changes

    def numbers(self, *names: str) -> list[float]:
        """Return these numbers of each logged step."""
        return [float(line[name]) for line in self.log for name in names if name in line]


def causal_model() -> Any:
    """Return the same untrained model each time; its loss is divided by num_items_in_batch."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Trained]]:
    """Return a function that trains three steps, under a plan or (with None) without."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for one another on a busy machine
    yield lambda *args, **kwargs: _train(tmp_path, *args, **kwargs)
    torch.set_num_threads(num_threads)


def _train(
    folder: Path,
    plan: dict[str, Any] | None,
    batches: tuple[int, int],
    *,
    make_model: Callable[[], Any] = TOKENS["tiny_model"],
    base: Any = None,
    arguments: dict[str, Any] | None = None,
    optimizers: Callable[[Any], tuple[Any, Any]] = lambda model: (None, None),
    resume: bool = False,
    **more: Any,
) -> Trained:
    from transformers import Seq2SeqTrainingArguments, Trainer, TrainerCallback

    base = base or Trainer
    changes = quiet()
    arguments_class: Any = Seq2SeqTrainingArguments  # Trainer takes them too
    samples: list[set[tuple[int, ...]]] = [set()]

    class Own(base):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            samples[-1] |= {tuple(token for token in row if token) for row in inputs["input_ids"].tolist()}
            return super().training_step(model, inputs, *args)

    own_class: Any = Own
    if plan is not None:
        wanted = settings(**{"trainer_accumulates": True, **plan})
        arguments_class = planned_arguments(Seq2SeqTrainingArguments, wanted, changes)
        own_class = planned_trainer(Own, PLAN, wanted, changes)
    events: Counter[str] = Counter()

    class Count(TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                events[name] += 1
            return super().__getattribute__(name)

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            samples.append(set())

    own = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e9, "logging_steps": 1}
    silent = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    made = arguments_class(
        output_dir=str(folder),
        per_device_train_batch_size=batches[0],
        gradient_accumulation_steps=batches[1],
        **{**own, **silent, **(arguments or {})},
    )
    model = make_model()
    sizes: set[int] = set()
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, inputs: sizes.add(len(inputs[0])) if module.training else None
    )
    trainer = own_class(
        model=model,
        args=made,
        train_dataset=TOKENS["samples"](24),
        eval_dataset=TOKENS["samples"](6),
        data_collator=TOKENS["collator"](),
        optimizers=optimizers(model),
        callbacks=[Count()],
        **more,
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return Trained(
        log=trainer.state.log_history,
        events=events,
        samples=samples,
        sizes=sizes,
        trainer=trainer,
        changes=changes,
    )


def assert_same(found: Trained, expected: Trained) -> None:
    for names in (("loss",), ("grad_norm",), ("learning_rate",), ("eval_loss",)):
        assert found.numbers(*names) == pytest.approx(expected.numbers(*names), rel=FP32_TOLERANCE), names
    assert found.samples == expected.samples
    assert found.trainer.state.max_steps == expected.trainer.state.max_steps
    assert found.trainer.state.global_step == expected.trainer.state.global_step
    substeps = {"on_substep_end": 0}
    assert dict(found.events) | substeps == dict(expected.events) | substeps


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One big batch in each step, without a plan."""
    return _train(tmp_path_factory.mktemp("whole"), None, (8, 1))


def test_trainer_makes_loss_and_gradients_of_some_models_too_large(
    train: Callable[..., Trained], whole: Trained
) -> None:
    accumulated = train(None, (4, 2))
    for name in ("loss", "grad_norm"):
        assert accumulated.numbers(name)[0] == pytest.approx(2 * whole.numbers(name)[0], rel=1e-2)


@pytest.mark.parametrize(
    ("plan", "batches"),
    [
        ({}, (4, 2)),
        ({}, (2, 4)),
        (PIECES, (8, 1)),
        (PIECES, (4, 2)),
        ({"micro_batch_size": 8, "gradient_accumulation_steps": 1}, (2, 4)),
        (SPLIT, (8, 1)),
        (SPLIT, (4, 2)),
    ],
)
def test_under_a_plan_they_are_those_of_one_large_batch(
    plan: dict[str, Any], batches: tuple[int, int], train: Callable[..., Trained], whole: Trained
) -> None:
    found = train(plan, batches)
    assert_same(found, whole)
    weighted = any(line.startswith("each batch's loss counts by its share") for line in found.changes.lines)
    assert weighted == (found.trainer.args.gradient_accumulation_steps > 1)


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2, "save_strategy": "steps"}


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        ({}, {}),
        ({**EVALUATES, "save_steps": 2, "load_best_model_at_end": True}, {}),
        ({"num_train_epochs": 2, "max_steps": -1}, {}),
        ({"label_smoothing_factor": 0.1}, {}),
        ({"neftune_noise_alpha": 0.0}, {}),
        ({"train_sampling_strategy": "group_by_length"}, {}),
    ],
    ids=["plain", "evaluating and saving", "epochs", "label smoothing", "neftune", "grouped by length"],
)
def test_a_model_that_divides_by_the_items_trains_the_same(
    arguments: dict[str, Any], more: dict[str, Any], train: Callable[..., Trained]
) -> None:
    options = {"make_model": causal_model, "arguments": arguments, **more}
    found = train(PIECES, (8, 1), **options)
    assert_same(found, train(None, (8, 1), **options))
    assert found.events["on_substep_end"] == 3 * found.trainer.state.global_step
    assert not any("share of the step's labels" in line for line in found.changes.lines)


def test_a_loss_function_of_the_scripts_own_trains_the_same(train: Callable[..., Trained]) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        from torch.nn.functional import cross_entropy

        total = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / num_items_in_batch

    assert_same(train(PIECES, (8, 1), compute_loss_func=loss), train(None, (8, 1), compute_loss_func=loss))


@pytest.mark.parametrize(("first", "then"), [(None, PIECES), (PIECES, None), (PIECES, PIECES)])
def test_a_run_resumes_from_a_checkpoint_made_with_and_without_the_plan(
    first: dict[str, Any] | None, then: dict[str, Any] | None, train: Callable[..., Trained]
) -> None:
    options = {"make_model": causal_model, "arguments": {"save_strategy": "steps", "save_steps": 2}}
    whole = train(None, (8, 1), **options)
    train(first, (8, 1), **options)  # leaves checkpoint-2 and checkpoint-3
    _forget(train, "checkpoint-3", whole)
    resumed = train(then, (8, 1), **options, resume=True)
    assert resumed.numbers("loss") == pytest.approx(whole.numbers("loss"), rel=FP32_TOLERANCE)
    assert resumed.samples == [whole.samples[-2], set()]


def test_batches_that_would_change_the_steps_of_an_epoch_are_refused(train: Callable[..., Trained]) -> None:
    dropping = {"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": True}
    with pytest.raises(UserError, match="would change the number of optimizer steps") as refused:
        train({"micro_batch_size": 2}, (10, 1), arguments=dropping)
    assert "3 steps in an epoch of 24 samples; the script's batches make 2" in str(refused.value)


def _forget(train: Any, name: str, run: Trained) -> None:
    import shutil
    from pathlib import Path

    shutil.rmtree(Path(run.trainer.args.output_dir) / name)


def adapted_model() -> Any:
    """Return a model that trains adapters alone."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(causal_model(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def sequence_model() -> Any:
    """Return an encoder and decoder; its loss ignores num_items_in_batch or not, as transformers has it."""
    from transformers import T5Config, T5ForConditionalGeneration, set_seed

    set_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


@pytest.mark.parametrize("plan", [PIECES, SPLIT], ids=["accumulated", "split"])
@pytest.mark.parametrize("kind", ["LoRA", "Seq2Seq"])
def test_adapters_and_sequence_to_sequence_models_train_the_same(
    kind: str, plan: dict[str, Any], train: Callable[..., Trained]
) -> None:
    from transformers import Seq2SeqTrainer

    options: dict[str, Any] = {
        "LoRA": {"make_model": adapted_model, "arguments": {"activation_checkpointing": True}},
        "Seq2Seq": {
            "make_model": sequence_model,
            "base": Seq2SeqTrainer,
            "arguments": {"learning_rate": 0.01},
        },
    }[kind]
    assert_same(train(plan, (8, 1), **options), train(None, (8, 1), **options))


@pytest.mark.parametrize(
    ("name", "kind"),
    [(OptimizerName.ADAMW, "AdamW"), (OptimizerName.ADAFACTOR, "Adafactor"), (OptimizerName.SGD, "SGD")],
)
def test_the_plans_optimizer_trains(name: OptimizerName, kind: str, train: Callable[..., Trained]) -> None:
    found = train({"optimizer": name}, (8, 1), arguments={"optim": "adagrad"})
    assert type(found.trainer.optimizer.optimizer).__name__ == kind
    assert found.numbers("learning_rate") == pytest.approx([0.1, 0.2 / 3, 0.1 / 3])


def test_an_optimizer_that_the_script_hands_over_is_swapped(train: Callable[..., Trained]) -> None:
    import torch

    def optimizers(model: Any) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2)

    found = train({"optimizer": OptimizerName.SGD}, (8, 1), optimizers=optimizers)
    assert type(found.trainer.optimizer.optimizer).__name__ == "SGD"
    assert found.numbers("learning_rate") == [0.25, 0.25, 0.5]
    assert "the optimizer is SGD; the script hands its Trainer AdamW" in found.changes.lines


def distilling(base: Any) -> Any:
    """Return a Trainer of a script's own: its loss is made of two forward passes, one of them a teacher's."""
    import torch

    teacher = causal_model().eval()

    class Distilling(base):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
            outputs = model(**inputs)
            again = model(**inputs)
            with torch.no_grad():
                wanted = teacher(**inputs).logits
            apart = (outputs.logits.log_softmax(-1) - wanted.softmax(-1)).square().sum() / num_items_in_batch
            return outputs.loss + 0.5 * again.loss + 0.1 * apart

    return Distilling


def test_a_trainer_of_the_scripts_own_is_split(train: Callable[..., Trained]) -> None:
    from transformers import Trainer

    options = {"make_model": causal_model, "base": distilling(Trainer)}
    found = train(SPLIT, (8, 1), **options)
    assert_same(found, train(None, (8, 1), **options))
    assert found.sizes == {2, 3}


@pytest.mark.parametrize(
    "arguments",
    [
        {**EVALUATES, "save_steps": 2, "load_best_model_at_end": True},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 0.0, "activation_checkpointing": True},
    ],
    ids=["evaluating and saving", "label smoothing", "neftune"],
)
def test_what_trainer_does_beside_training_is_the_same_when_split(
    arguments: dict[str, Any], train: Callable[..., Trained]
) -> None:
    options = {"make_model": causal_model, "arguments": arguments}
    assert_same(train(SPLIT, (8, 1), **options), train(None, (8, 1), **options))
