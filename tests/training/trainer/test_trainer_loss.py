"""Whether a model's loss knows of a step's other batches is asked without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer_training import SPLIT, TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_training import Trained


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
