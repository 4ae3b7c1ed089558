"""Trainer's windows take the steps of one big batch, whatever the model makes of num_items_in_batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from trainer_training import SPLIT, TOKENS
from window_trainings import KINDS, SAME, distance

from zerofit.training.step import trainer_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_training import Trained

EPOCH = {"max_steps": -1, "num_train_epochs": 1}
"""24 samples: windows of 10, 10 and 4."""


@pytest.mark.parametrize("kind", ["classification", "token classification", "causal language model"])
@pytest.mark.parametrize(
    ("plan", "batches"),
    [
        ({}, (2, 5)),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 5}, (10, 1)),
        ({"micro_batch_size": 4, "trainer_accumulates": False}, (10, 1)),
    ],
    ids=["the script's", "the plan's", "split inside the forward pass"],
)
def test_a_window_steps_as_the_big_batch(
    kind: str, plan: dict[str, Any], batches: tuple[int, int], train: Callable[..., Trained]
) -> None:
    make, collate, _ = KINDS[kind]
    big = train(None, (10, 1), make_model=make, collate=collate, arguments=EPOCH)
    found = train(plan, batches, make_model=make, collate=collate, arguments=EPOCH)
    assert found.samples == big.samples
    assert max(found.sizes) < max(big.sizes)
    weights = [list(one.trainer.model.parameters()) for one in (found, big)]
    assert distance(*weights, list(make().parameters())) < SAME


def test_trainer_by_itself_does_not_for_a_model_that_ignores_the_items(train: Callable[..., Trained]) -> None:
    make, collate, _ = KINDS["classification"]
    big, small = (
        train(None, batches, make_model=make, collate=collate, arguments=EPOCH)
        for batches in ((10, 1), (2, 5))
    )
    apart = [list(one.trainer.model.parameters()) for one in (small, big)]
    assert small.numbers("loss")[0] == pytest.approx(5 * big.numbers("loss")[0], rel=1e-3)
    assert distance(*apart, list(make().parameters())) > SAME


def test_whether_a_model_ignores_the_items_is_asked_with_no_more_samples_than_a_micro_batch(
    train: Callable[..., Trained],
) -> None:
    asked = []

    def watched() -> Any:
        model = TOKENS["tiny_model"]()
        model.get_input_embeddings().register_forward_pre_hook(
            lambda module, inputs: None if module.training else asked.append(len(inputs[0]))
        )
        return model

    found = train(SPLIT, (8, 2), make_model=watched, arguments={"max_steps": 1})
    assert any(line.startswith("each batch's loss counts by its share") for line in found.changes.lines)
    assert asked[:2] == [SPLIT["micro_batch_size"]] * 2


def test_asking_it_calls_no_train_and_no_eval_of_the_modules(train: Callable[..., Trained]) -> None:
    calls = []

    class Merging(torch.nn.Dropout):
        """Does something when it is switched, as layers that merge their adapters in evaluation do."""

        def train(self, mode: bool = True) -> Merging:
            calls.append(mode)
            return super().train(mode)

    def merging() -> Any:
        model = TOKENS["tiny_model"]()
        model.dropout = Merging(0.0)
        return model

    train({}, (4, 2), make_model=merging, arguments={"max_steps": 1})
    assert False not in calls


def test_asking_it_compiles_nothing() -> None:
    """A large model takes minutes to compile, and would once more for its training."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, rows: Any) -> dict[str, Any]:
            return {"loss": self.linear(rows).mean()}

    model = torch.compile(Model(), backend=backend)
    rows = torch.ones(2, 4)
    asked = trainer_loss._probed_loss(model, {"rows": rows})
    assert graphs == []
    assert asked == pytest.approx(float(model(rows)["loss"].detach()))
    assert len(graphs) == 1


class _Model(torch.nn.Module):
    """Divides its loss by the labels of a step, as many as there are but one at least; or ignores them."""

    def __init__(self, *, ignores: bool) -> None:
        super().__init__()
        self.weight, self.ignores = torch.nn.Parameter(torch.ones(1)), ignores

    def forward(self, losses: Any, num_items_in_batch: int) -> dict[str, Any]:
        loss = (self.weight * losses).sum()
        return {"loss": loss if self.ignores else loss / max(num_items_in_batch, 1)}


def _ignores(trainer: Any, model: Any, *losses: float, num_items: int) -> bool:
    inputs = {"losses": torch.tensor(losses)}
    return trainer_loss._ignores_num_items(trainer, model, inputs, num_items, at_most=None)


def _trainer() -> Any:
    accelerator = SimpleNamespace(gather=lambda answers: answers)
    return SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(device="cpu"))


@pytest.mark.parametrize("ignores", [True, False])
@pytest.mark.parametrize("num_items", [1, 2, 100])
def test_whether_a_model_ignores_the_items_is_seen_however_few_there_are(
    ignores: bool, num_items: int
) -> None:
    assert _ignores(_trainer(), _Model(ignores=ignores), 1.0, 2.0, num_items=num_items) is ignores


@pytest.mark.parametrize("ignores", [True, False])
@pytest.mark.parametrize("unclear", [0.0, float("nan"), float("inf")])
def test_a_batch_whose_loss_tells_nothing_leaves_the_question_to_the_next(
    unclear: float, ignores: bool
) -> None:
    trainer, model = _trainer(), _Model(ignores=ignores)
    assert _ignores(trainer, model, unclear, num_items=4) is False
    assert _ignores(trainer, model, 1.0, num_items=4) is ignores


def test_a_batchs_loss_is_the_same_beside_its_outputs(train: Callable[..., Trained]) -> None:
    """A script's Trainer may ask for both in a loss of its own."""
    make, collate, _ = KINDS["classification"]
    found = train({}, (2, 2), make_model=make, collate=collate, arguments={"max_steps": 1})
    trainer, batch = found.trainer, collate(TOKENS["samples"](2))
    trainer.model.train()
    alone = trainer.model(**batch).loss
    share = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=8)
    beside, outputs = trainer.compute_loss(
        trainer.model, dict(batch), return_outputs=True, num_items_in_batch=8
    )
    assert float(beside) == float(share) == pytest.approx(float(alone) * 2 / 8)
    assert outputs["logits"].shape == (2, 3)
