"""The script's batch size: checked against the plan's, and not reduced after an out-of-memory error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
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


def check_batch(
    settings: AppliedSettings, *, batch_size: int | None, accumulation: int, num_ranks: int
) -> None:
    """Check that the script's own numbers give the batch size of the plan.

    Args:
        settings: the plan's.
        batch_size: samples per rank in one forward pass of the script; None if unknown.
        accumulation: the script's forward passes per rank in one optimizer step.
        num_ranks: ranks with different samples.
    """
    if batch_size is None:
        return
    _check_global_batch(settings, batch_size=batch_size, accumulation=accumulation, num_ranks=num_ranks)
    micro_batch_size = settings.strategy.micro_batch_size
    if micro_batch_size is None:
        return
    if micro_batch_size > batch_size:
        raise micro_batch_too_large(
            settings,
            batch_size,
            why="zerofit splits the script's batches, and can't merge several of them",
        )
    pieces = -(-batch_size // micro_batch_size) * accumulation
    asked = settings.strategy.gradient_accumulation_steps
    if asked is not None and asked not in (pieces, accumulation * batch_size / micro_batch_size):
        raise UserError(
            "accumulation-differs-from-script",
            "these micro-batches don't add up to the script's step",
            found=f"micro-batches of {micro_batch_size}, accumulated {asked} times, and "
            f"{_times(batch_size, accumulation)} samples on each rank in a step of the script",
            why=f"with this size, a step of the script has {pieces} micro-batches, and zerofit never changes "
            "a global batch size by itself",
            fix="give --micro-batch-size and --gradient-accumulation-steps whose product is "
            f"{batch_size * accumulation}, or --micro-batch-size alone",
        )


def _check_global_batch(
    settings: AppliedSettings, *, batch_size: int, accumulation: int, num_ranks: int
) -> None:
    asked = settings.global_batch_size
    own = batch_size * accumulation * num_ranks
    if asked in (None, own):
        return
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    raise UserError(
        "global-batch-differs",
        "the script does not have the requested global batch size",
        found=f"global batch {asked}, and {_times(batch_size, accumulation)} samples on each of "
        f"{ranks} in the script, which makes {own}",
        why="zerofit splits the script's batches, and never changes a global batch by itself",
        fix=_batch_fix(asked, batch_size=batch_size, accumulation=accumulation, num_ranks=num_ranks),
    )


def _batch_fix(asked: int | None, *, batch_size: int, accumulation: int, num_ranks: int) -> str:
    """Return which of the script's numbers would give the requested global batch."""
    ways = [f"a global batch of {batch_size * accumulation * num_ranks}"]
    size, rest = divmod(asked or 0, accumulation * num_ranks)
    if size and not rest:
        ways.append(f"a batch size of {size} in the script")
    steps, rest = divmod(asked or 0, batch_size * num_ranks)
    if steps and not rest:
        ways.append(f"an accumulation of {steps} in the script")
    return f"take {', or '.join(ways)}"


def _times(batch_size: int, accumulation: int) -> str:
    return str(batch_size) if accumulation == 1 else f"{batch_size} x {accumulation}"


def micro_batch_too_large(settings: AppliedSettings, batch_size: int, *, why: str) -> UserError:
    """Return the error for a micro-batch that is larger than the script's batch."""
    micro_batch_size = settings.strategy.micro_batch_size
    if settings.plan.is_set_by_user("micro_batch_size"):
        found = f"--micro-batch-size {micro_batch_size}"
        fix = f"set --micro-batch-size to {batch_size} or less"
    else:
        found = f"micro-batches of {micro_batch_size} in the plan"
        fix = "plan again with the script as it is now"
    return UserError(
        "micro-batch-too-large",
        "a micro-batch is a part of the script's batch",
        found=f"{batch_size} samples on each rank, and {found}",
        why=why,
        fix=f"{fix}, or give the script a larger batch size",
    )


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
