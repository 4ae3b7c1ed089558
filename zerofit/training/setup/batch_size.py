"""The script's batch size: checked against the plan's, and not reduced after an out-of-memory error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.training.settings import check_batch
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Check the script's batch size when it first prepares a training DataLoader."""

    def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        batch_size = _training_batch_size(self, args, settings)
        if self._zerofit_by_script and batch_size is not None and not hasattr(self, "_zerofit_batch_size"):
            # Later calls may prepare other data, which need not match the plan's batch size.
            self._zerofit_batch_size = batch_size
            check_batch(
                settings,
                batch_size=batch_size,
                accumulation=self.gradient_accumulation_steps,
                num_ranks=_num_readers(self, settings),
            )
        return original(self, *args, **kwargs)

    return {"prepare": prepare}


def _training_batch_size(accelerator: Any, objects: tuple[Any, ...], settings: AppliedSettings) -> int | None:
    """Return the batch size per rank of the training DataLoader; None if it is unknown.

    It is a DataLoader that shuffles, or the only one beside an optimizer. Of several, it is one with the
    captured batch size, since a script may also shuffle its evaluation data, or else the largest.
    """
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    num_loaders = sum(isinstance(item, DataLoader) for item in objects)
    is_only_one = num_loaders == 1 and any(isinstance(item, Optimizer) for item in objects)
    sizes = batch_sizes(accelerator, objects, settings, shuffled=not is_only_one)
    captured = captured_batch_size(settings)
    return captured if captured in sizes else max(sizes, default=None)


def captured_batch_size(settings: AppliedSettings) -> int | None:
    """Return the script's batch size per rank as captured; None without a capture."""
    return settings.plan.capture.micro_batch_size if settings.plan.capture is not None else None


def batch_sizes(
    accelerator: Any, objects: tuple[Any, ...], settings: AppliedSettings, *, shuffled: bool
) -> list[int]:
    """Return the batch sizes per rank of all DataLoaders, or of those that shuffle."""
    from torch.utils.data import DataLoader, RandomSampler

    ranks = _num_readers(accelerator, settings) if accelerator.split_batches else 1
    return [
        max(1, int(loader.batch_size) // ranks)
        for loader in objects
        if isinstance(loader, DataLoader)
        and loader.batch_size
        and (isinstance(loader.sampler, RandomSampler) or not shuffled)
    ]


def _num_readers(accelerator: Any, settings: AppliedSettings) -> int:
    """Return the number of ranks, or groups of ranks, with different samples."""
    return int(accelerator.num_processes) // settings.sample_group_size


def install_batch_search(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Handle out-of-memory errors by recovery instead of find_executable_batch_size.

    The latter would reduce the global batch size at the same learning rate.

    Args:
        module: accelerate.utils.memory.
    """

    def should_reduce(original: Any, exception: Exception) -> bool:
        if not original(exception):
            return False
        if settings.plan.recovers:
            changes.add(
                "find_executable_batch_size does not reduce the batch size, which would change the global "
                "batch size: the run is restarted with another plan"
            )
            return False
        changes.add(
            "find_executable_batch_size reduces the batch size: the global batch size is not the plan's"
        )
        return True

    wrap(module, "should_reduce_batch_size", should_reduce)
