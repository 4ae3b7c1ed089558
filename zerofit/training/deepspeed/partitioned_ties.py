"""Keeps a model's output layer apart from its embeddings where they differ and ZeRO-3 hides that.

Where a checkpoint has values for both though the configuration ties them (T5 v1.1, flan-T5, mT5),
transformers compares them, and ties only what is equal. Under stage 3 it compares two empty placeholders,
which are, and the model loses the values of its output layer without a word.
Source: transformers/modeling_utils.py, tie_weights (5.23).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.transformers import compare_tied_by

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from zerofit.training.changes import Changes


def install(module: ModuleType, changes: Changes) -> None:
    """Hook the comparison.

    Args:
        module: transformers.modeling_utils.
        changes: where to note what was kept apart.
    """

    def are_equal(original: Callable[[Any, Any], bool], first: Any, second: Any) -> bool:
        if first is second or not (hasattr(first, "ds_id") and hasattr(second, "ds_id")):
            return original(first, second)
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([first, second]):
            is_equal = original(first, second)
        if not is_equal:
            changes.add(
                "the output layer keeps weights of its own: the checkpoint has other values for it than "
                "for the embeddings, which ZeRO-3 hides from transformers"
            )
        return is_equal

    compare_tied_by(module, are_equal)
