"""Trainer's windows take the steps of one big batch, whatever the model makes of num_items_in_batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from trainer_training import SPLIT, TOKENS
from window_trainings import KINDS, SAME, distance

from zerofit.training.step.trainer_loss import _probed_loss

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
    import torch

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
    import torch

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
    asked = _probed_loss(model, {"rows": rows})
    assert graphs == []
    assert asked == pytest.approx(float(model(rows)["loss"].detach()))
    assert len(graphs) == 1
