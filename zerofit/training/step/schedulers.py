"""Keeps learning-rate schedulers in step with the optimizer when it is replaced, or its groups change.

They are looked up in the whole process: a script need not prepare its scheduler, or prepares it later.
"""

from __future__ import annotations

import functools
import gc
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings

_PER_GROUP = (
    "base_lrs",
    "lr_lambdas",
    "_last_lr",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
)
"""Lists in which torch's schedulers have one entry per parameter group (torch/optim/lr_scheduler.py)."""


def install(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Give DeepSpeed's optimizers the `defaults` of those inside.

    torch's OneCycleLR and CyclicLR look there for a momentum to cycle, and a script may create them for the
    prepared optimizer. DeepSpeed 0.19's optimizers have no such attribute.

    Args:
        module: deepspeed.runtime.base_optimizer.
    """

    def set_defaults(self: Any, values: dict[str, Any]) -> None:
        self.optimizer.defaults = values

    if not hasattr(module.DeepSpeedOptimizer, "defaults"):
        module.DeepSpeedOptimizer.defaults = property(lambda self: self.optimizer.defaults, set_defaults)


def live_objects(kind: type) -> list[Any]:
    """Return all objects of a class: libraries keep no list of optimizers and schedulers."""
    return [item for item in gc.get_objects() if issubclass(type(item), kind)]


def schedulers_of(optimizer: Any) -> list[Any]:
    """Return all schedulers created for an optimizer, and their parts."""
    from torch.optim.lr_scheduler import LRScheduler

    return [item for item in live_objects(LRScheduler) if getattr(item, "optimizer", None) is optimizer]


def lead_schedulers(stale: Any, live: Any) -> None:
    """Make the schedulers of one optimizer set the learning rate of another."""
    schedulers = schedulers_of(stale) if live is not stale else []
    for scheduler in schedulers:
        scheduler.optimizer = live
    if schedulers:
        _count_steps(live)


def _count_steps(optimizer: Any) -> None:
    """Make schedulers see the optimizer's steps, as if they were created from it.

    Without it they warn (torch/optim/lr_scheduler.py, patch_track_step_called).
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    original = type(optimizer).step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True
        return original(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)


def lead_to_live_optimizers(optimizers: Iterable[Any]) -> None:
    """Make schedulers set the learning rate of the optimizers that step under DeepSpeed.

    With optimizer offload accelerate replaces AdamW by DeepSpeed's CPU Adam, and schedulers keep the old one.
    Both share their parameter groups only until a checkpoint is loaded; from then on the learning rate would
    be constant (https://github.com/deepspeedai/DeepSpeed/issues/4344).
    """
    from torch.optim.lr_scheduler import LRScheduler

    inner: list[Any] = [getattr(wrapper.optimizer, "optimizer", None) for wrapper in optimizers]
    live = {id(optimizer.param_groups[0]): optimizer for optimizer in inner if optimizer is not None}
    led: list[Any] = [getattr(scheduler, "optimizer", None) for scheduler in live_objects(LRScheduler)]
    for optimizer in {
        id(optimizer): optimizer for optimizer in led if getattr(optimizer, "param_groups", None)
    }.values():
        # A scheduler created from a prepared optimizer already drives the inner one.
        is_own = type(optimizer).__module__.split(".")[0] not in ("accelerate", "deepspeed")
        if is_own and id(optimizer.param_groups[0]) in live:
            lead_schedulers(optimizer, live[id(optimizer.param_groups[0])])


def drop_empty_groups(objects: Iterable[Any]) -> None:
    """Remove parameter groups without parameters from optimizers and their schedulers.

    DeepSpeed only removes them from the optimizer (deepspeed/runtime/engine.py, _configure_optimizer), and
    the scheduler's next step fails: "zip() argument 2 is longer than argument 1". A "no decay" group, as in
    many scripts, is empty for a model without biases.
    """
    from torch.optim import Optimizer

    for optimizer in objects:
        if not isinstance(optimizer, Optimizer):
            continue
        kept = [bool(group["params"]) for group in optimizer.param_groups]
        if all(kept):
            continue
        for scheduler in schedulers_of(optimizer):
            for name in _PER_GROUP:
                _keep(getattr(scheduler, name, None), kept)
        _keep(optimizer.param_groups, kept)


def repeat_entry(optimizer: Any, index: int) -> None:
    """Add an entry to an optimizer's schedulers for a group that was split off another."""
    num_before = len(optimizer.param_groups) - 1
    for scheduler in schedulers_of(optimizer):
        for name in _PER_GROUP:
            entries = getattr(scheduler, name, None)
            if isinstance(entries, list) and len(entries) == num_before:
                entries.append(entries[index])


def _keep(entries: Any, kept: list[bool]) -> None:
    if isinstance(entries, list) and len(entries) == len(kept):
        entries[:] = [entry for entry, is_kept in zip(entries, kept, strict=True) if is_kept]
