"""Makes DeepSpeed train parameters without dimensions, such as CLIP's logit scale.

It broadcasts parameters as bytes, by `data.view(torch.uint8)`, which torch refuses for 0-d tensors: at every
stage when the engine is created (0.19.8, runtime/engine.py, _broadcast_model), at stage 3 also when a
parameter is partitioned or was changed while gathered (runtime/zero/partition_parameters.py). Meanwhile such
a parameter gets the shape (1,).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.deepspeed import BROADCAST_MODEL, CONVERT_PARAMETER
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


def engine_wrappers(engine_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Give parameters without dimensions one while a new engine broadcasts the weights."""

    def broadcast_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        scalars = _with_one_dimension(self.module.parameters())
        try:
            return original(self, *args, **kwargs)
        finally:
            for scalar in scalars:
                scalar.data = scalar.data.view(())

    return {BROADCAST_MODEL: broadcast_model}


def install_in_partitioning(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Hook stage 3's broadcasts of single parameters.

    Args:
        module: deepspeed.runtime.zero.partition_parameters.
    """

    def convert(original: Any, self: Any, parameter: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, parameter, *args, **kwargs)  # records the shape
        _with_one_dimension((parameter,))
        return result

    def leave(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.enabled and self.src_rank is not None:
            _with_one_dimension(self.params)
        return original(self, *args, **kwargs)

    wrap(module.Init, CONVERT_PARAMETER, convert)
    wrap(module.GatheredParameters, "__exit__", leave)


def _with_one_dimension(parameters: Iterable[Any]) -> list[Any]:
    """Give 0-d parameters one dimension, and return them."""
    scalars = [scalar for scalar in parameters if not scalar.data.dim()]
    for scalar in scalars:
        scalar.data = scalar.data.view(1)
    return scalars
