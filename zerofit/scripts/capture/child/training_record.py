"""Optimizers, schedulers and DataLoaders of a script, as values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.capture import CapturedGroup, CapturedLoader, CapturedOptimizer, CapturedScheduler
from zerofit.core.optimizers.lookup import memory_of, optimizer_class
from zerofit.core.optimizers.step_trace import OwnSteps
from zerofit.models.element_wise import try_element_wise
from zerofit.models.trace.optimizer_step import trace_steps
from zerofit.scripts.capture.child.model_record import class_path

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

_STEPS = ("total_steps", "T_max", "total_iters")
"""Attributes of torch's schedulers with their number of steps (torch/optim/lr_scheduler.py)."""

_RANDOM_COLLATORS = {"transformers.DataCollatorForPermutationLanguageModeling", "zerofit.WholeWordCollator"}
"""Collators that mask randomly (transformers 5.23, data/data_collator.py; zerofit/data/)."""
_FIXED_COLLATORS = {
    "torch.default_collate",
    "torch.default_convert",
    "transformers.default_data_collator",
    "transformers.DefaultDataCollator",
    "transformers.DataCollatorWithPadding",
    "transformers.DataCollatorWithFlattening",
    "transformers.DataCollatorForTokenClassification",
    "transformers.DataCollatorForSeq2Seq",
    "transformers.DataCollatorForMultipleChoice",
}
"""Collators without random numbers (torch/utils/data/_utils/collate.py, and the same files)."""


def captured_optimizers(
    optimizers: Iterable[Any], prepared: Mapping[int, Any]
) -> tuple[CapturedOptimizer, ...]:
    """Return the facts about optimizers, given those passed to prepare()."""
    seen = list(optimizers)
    known = {id(optimizer) for optimizer in seen}
    # torchao's CPUOffloadOptimizer does not call Optimizer.__init__, and has an AdamW for each parameter.
    wrapping = [optimizer for optimizer in prepared.values() if id(optimizer) not in known]
    inner = {id(optimizer) for outer in wrapping for optimizer in _inner_optimizers(outer)}
    whole = [*(optimizer for optimizer in seen if id(optimizer) not in inner), *wrapping]
    return tuple(_captured(optimizer, is_prepared=id(optimizer) in prepared) for optimizer in whole)


def _inner_optimizers(optimizer: Any) -> Iterator[Any]:
    from torch.optim import Optimizer

    for value in vars(optimizer).values():
        for inner in value.values() if isinstance(value, dict) else (value,):
            if isinstance(inner, Optimizer):
                yield inner


def _captured(optimizer: Any, *, is_prepared: bool) -> CapturedOptimizer:
    path = optimizer_class(optimizer)
    groups = tuple(_group(group, optimizer) for group in optimizer.param_groups)
    return CapturedOptimizer(
        class_path=path,
        groups=groups,
        is_prepared=is_prepared,
        is_element_wise=try_element_wise(optimizer).is_kept if is_prepared else None,
        steps=_steps(optimizer, path, groups) if is_prepared else None,
    )


def _steps(optimizer: Any, path: str, groups: tuple[CapturedGroup, ...]) -> OwnSteps | None:
    """Return the steps of an optimizer that the table does not know exactly; None if they can't be traced."""
    _, is_exact = memory_of(path, groups[0].settings if groups else {})
    if is_exact or path.partition(".")[0] in _OF_KERNELS:
        return None
    try:
        return trace_steps(optimizer)
    except Exception:  # any: it is the script's code
        return None


_OF_KERNELS = ("bitsandbytes", "deepspeed")
"""Packages whose kernels have no form for tensors without values."""


def _group(group: dict[str, Any], optimizer: Any) -> CapturedGroup:
    settings = {key: json_value(value) for key, value in group.items() if key not in ("params", "initial_lr")}
    # During warm-up a scheduler has already set lr to 0.
    settings["lr"] = json_value(group.get("initial_lr", group.get("lr")))
    settings["is_paged"] = getattr(optimizer, "is_paged", None) or None  # bitsandbytes' AdamW(is_paged=True)
    return CapturedGroup(
        num_tensors=len(group["params"]),
        num_parameters=sum(parameter.numel() for parameter in group["params"]),
        settings={key: value for key, value in settings.items() if value is not None},
    )


def captured_schedulers(
    schedulers: Iterable[Any], prepared: Collection[int], *, num_steps: int | None
) -> tuple[CapturedScheduler, ...]:
    """Return the facts about learning-rate schedulers.

    Args:
        schedulers: those of the script.
        prepared: ids of those passed to prepare(), or owned by a Trainer.
        num_steps: of a Trainer, if the scheduler itself does not say.
    """
    return tuple(
        CapturedScheduler(
            class_path=class_path(type(scheduler)),
            initial_lrs=tuple(float(lr) for lr in _base_lrs(scheduler)),
            num_steps=_num_steps(scheduler) or num_steps,
            is_prepared=id(scheduler) in prepared,
        )
        for scheduler in schedulers
    )


def _base_lrs(scheduler: Any) -> list[Any]:
    if hasattr(scheduler, "base_lrs"):
        return list(scheduler.base_lrs)
    optimizer = getattr(scheduler, "optimizer", None)
    groups = optimizer.param_groups if optimizer is not None else []
    return [group.get("initial_lr", group["lr"]) for group in groups]


def _num_steps(scheduler: Any) -> int | None:
    function = (getattr(scheduler, "lr_lambdas", None) or [None])[0]
    # transformers' schedules are functions with bound arguments.
    bound = getattr(function, "keywords", {})
    values = [bound.get("num_training_steps"), *(getattr(scheduler, name, None) for name in _STEPS)]
    return next((int(value) for value in values if isinstance(value, (int, float)) and value > 0), None)


def captured_loader(loader: Any) -> CapturedLoader:
    """Return the facts about a DataLoader, prepared or not."""
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):  # accelerate's shards wrap the script's own
        batches = batches.batch_sampler
    sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None) or batches
    size = getattr(batches, "batch_size", None) or getattr(loader, "batch_size", None)
    collator = loader.collate_fn
    if type(collator).__name__ == "RemoveColumnsCollator":  # Trainer's, around the script's own
        collator = collator.data_collator
    return CapturedLoader(
        batch_size=size if isinstance(size, int) else None,
        num_batches=_length(loader),
        num_samples=_length(loader.dataset),
        collator=_name_of(collator),
        draws_random=_draws_random(collator),
        sampler=type(sampler).__name__,
        drops_last=bool(getattr(batches, "drop_last", False)),
        num_workers=int(loader.num_workers),
    )


def _name_of(collator: Any) -> str:
    return str(getattr(collator, "__name__", type(collator).__name__))


def _draws_random(collator: Any) -> bool | None:
    """Return True if a collator draws random numbers; None for unknown collators."""
    package = (getattr(collator, "__module__", None) or "").partition(".")[0]
    name = f"{package}.{_name_of(collator)}"
    if name == "transformers.DataCollatorForLanguageModeling":
        return bool(collator.mlm)
    return False if name in _FIXED_COLLATORS else True if name in _RANDOM_COLLATORS else None


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def json_value(value: Any) -> Any:
    """Return a number, string, or list of these for JSON; None for anything else."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 and not getattr(value, "is_meta", False):
        return value.item()
    if isinstance(value, (list, tuple)):
        inner = [json_value(entry) for entry in value]
        return None if None in inner else inner
    return None
