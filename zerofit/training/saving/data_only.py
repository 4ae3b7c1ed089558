"""Hooks that load checkpoints as data: a file that would run code is refused, unless the user trusts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.checkpoint_pickles import loading_data_only
from zerofit.core.upstream.transformers import LOAD_MODEL, LOAD_OPTIMIZER

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Make Accelerator.load_state run no code of the checkpoint."""
    return _guarded(settings, "load_state")


def trainer_wrappers(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Make a Trainer that resumes run no code of the checkpoint."""
    return _guarded(settings, LOAD_MODEL, LOAD_OPTIMIZER)


def engine_wrappers(engine_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Make DeepSpeed's engine run no code of the checkpoint."""
    return _guarded(settings, "load_checkpoint")


def _guarded(settings: AppliedSettings, *methods: str) -> dict[str, Wrapper]:
    if settings.plan.trusts_checkpoint:
        return {}

    def load(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with loading_data_only():
            return original(self, *args, **kwargs)

    return dict.fromkeys(methods, load)
