"""Groups of ranks that train on the same samples, which accelerate counts once per rank.

Ranks of a tensor-parallel group share the layers of a copy of the model, those of a sequence-parallel group
the tokens of a sample, those of a pipeline the blocks of a model. accelerate gives them the same batches
(accelerate 1.15, data_loader.py, prepare_data_loader; to pipelines with zerofit's help), but otherwise
assumes different samples on each rank: the scheduler steps once per rank, gather_for_metrics() returns each
sample once per rank, and a script that multiplies by num_processes counts too many samples.
"""

from __future__ import annotations

import sys
from traceback import walk_stack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from types import FrameType, ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_LIBRARIES = (
    "accelerate",
    "deepspeed",
    "peft",
    "sentence_transformers",
    "torch",
    "transformers",
    "trl",
    "zerofit",
)
"""Packages that mean ranks by num_processes, and divide by the group size themselves."""


def install_num_processes(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Tell a script that there are as many ranks as groups."""
    size = settings.sample_group_size
    if size == 1:
        return
    own = accelerator_class.num_processes

    def num_processes(self: Any) -> int:
        ranks: int = own.fget(self)
        return ranks // size if _is_script(_caller()) else ranks

    accelerator_class.num_processes = property(num_processes, doc=own.__doc__)
    changes.add(
        f"ranks train in groups of {size} on the same samples: accelerator.num_processes counts the groups, "
        "and gathered or summed values hold each group once"
    )


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Count each group once in what a script gathers."""
    size = settings.sample_group_size
    if size == 1:
        return {}

    def gather(original: Any, self: Any, tensor: Any) -> Any:
        frame = _caller()
        gathered = original(self, tensor)
        for_metrics = frame is not None and frame.f_code.co_name == "gather_for_metrics"
        return _one_of_each_group(gathered, self, size) if for_metrics or _is_script(frame) else gathered

    def reduce(original: Any, self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        by_script = _is_script(_caller())
        reduced = original(self, tensor, reduction=reduction, scale=scale)
        return _divided(reduced, size) if by_script and reduction == "sum" else reduced

    def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if settings.uses_deepspeed:  # a pipeline reads streams on every rank
            for loader in args:
                _check_stream(loader, self, settings)
        return original(self, *args, **kwargs)

    return {"gather": gather, "reduce": reduce, "prepare": prepare}


def install_in_accelerate(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Make gathered objects contain each group's once.

    Args:
        module: accelerate.accelerator, whose gather_for_metrics() gathers other objects than tensors.
    """
    size = settings.sample_group_size

    def gather_object(original: Any, object: Any) -> Any:  # noqa: A002 - accelerate's own name
        return [item for part in original([object])[::size] for item in part]

    if size > 1:
        wrap(module, "gather_object", gather_object)


def install_in_scheduler(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Make a prepared scheduler step once per group of ranks, which is once per batch of an optimizer step.

    Args:
        module: accelerate.scheduler, which asks AcceleratorState only for the number of ranks.
    """
    if settings.sample_group_size > 1:
        groups = SimpleNamespace(num_processes=settings.plan.topology.data_parallel_size)
        module.AcceleratorState = lambda: groups  # type: ignore[attr-defined]


def trainer_wrappers(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Tell a Trainer how many ranks share its samples, as TrainingArguments.deepspeed would."""
    size = settings.sample_group_size
    if size == 1 or not hasattr(trainer_class, "get_tp_size"):
        return {}
    return {"get_tp_size": lambda original, self: size}


def _check_stream(loader: Any, accelerator: Any, settings: AppliedSettings) -> None:
    """Check that accelerate does not give one rank's batch of a stream to all groups.

    Its dispatcher uses one batch for all ranks if there are such groups, and its guard asks for a
    data-parallel dimension that the mesh under DeepSpeed never has (accelerate 1.15, data_loader.py,
    DataLoaderDispatcher).

    Raises:
        UserError: it would.
    """
    from torch.utils.data import DataLoader, IterableDataset

    groups = settings.plan.topology.data_parallel_size
    if groups == 1 or not isinstance(loader, DataLoader):
        return
    dispatches = accelerator.dispatch_batches
    kind = "sequence" if settings.sequence_parallel_size > 1 else "tensor"
    if dispatches or (dispatches is None and isinstance(loader.dataset, IterableDataset)):
        raise UserError(
            f"{kind}-parallel-dispatch",
            "all groups of ranks would train on the same samples",
            found=f"dispatch_batches={dispatches}, {groups} {kind}-parallel groups, and a dataset of type "
            f"{type(loader.dataset).__name__}",
            why="accelerate then reads one batch and sends it to every rank",
            fix="say dispatch_batches=False, in DataLoaderConfiguration or in accelerator_config",
        )


def _caller() -> FrameType | None:
    """Return the frame that called into a hook."""
    return next((frame for frame, _ in walk_stack(sys._getframe(1)) if _package(frame) != "zerofit"), None)


def _is_script(frame: FrameType | None) -> bool:
    return frame is not None and _package(frame) not in _LIBRARIES


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _one_of_each_group(gathered: Any, accelerator: Any, size: int) -> Any:
    """Return values gathered over all ranks, in rank order, from one rank of each group."""
    from accelerate.utils.operations import recursively_apply

    ranks = accelerator.state.num_processes

    def first(tensor: Any) -> Any:
        return tensor.unflatten(0, (ranks, len(tensor) // ranks))[::size].flatten(0, 1)

    return recursively_apply(first, gathered)


def _divided(summed: Any, size: int) -> Any:
    from accelerate.utils.operations import recursively_apply

    return recursively_apply(
        lambda tensor: tensor / size if tensor.is_floating_point() else tensor // size, summed
    )
