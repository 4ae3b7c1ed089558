"""Keeps learning-rate schedulers in step with the optimizer while DeepSpeed rearranges it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_PER_GROUP = ("base_lrs", "lr_lambdas", "_last_lr")
"""Lists in which torch's schedulers hold one entry a parameter group (torch/optim/lr_scheduler.py)."""


def drop_empty_groups(objects: Iterable[Any]) -> None:
    """Take parameter groups without parameters out of optimizers and of their schedulers alike.

    DeepSpeed takes them out of the optimizer alone (deepspeed/runtime/engine.py, _configure_optimizer), and
    the scheduler's next step fails: "zip() argument 2 is longer than argument 1". A model without biases and
    with a "no decay" group, as many scripts make it, is enough.

    Args:
        objects: what a script prepares.
    """
    tops = [item for item in objects if hasattr(item, "get_last_lr") and hasattr(item, "optimizer")]
    schedulers = [scheduler for top in tops for scheduler in _with_parts(top)]
    optimizers = {id(scheduler.optimizer): scheduler.optimizer for scheduler in schedulers}
    kept = {key: [bool(group["params"]) for group in item.param_groups] for key, item in optimizers.items()}
    for scheduler in schedulers:
        for name in _PER_GROUP:
            _keep(getattr(scheduler, name, None), kept[id(scheduler.optimizer)])
    for key, optimizer in optimizers.items():
        _keep(optimizer.param_groups, kept[key])


def _keep(entries: Any, kept: list[bool]) -> None:
    if isinstance(entries, list) and len(entries) == len(kept):
        entries[:] = [entry for entry, is_kept in zip(entries, kept, strict=True) if is_kept]


def lead_to_live_optimizer(accelerator: Any) -> None:
    """Let schedulers set the learning rate of the optimizer that steps.

    With optimizer offload accelerate replaces AdamW by DeepSpeed's CPU Adam, and schedulers keep the old one.
    Both share their parameter groups only until a checkpoint is loaded; from then on the learning rate would
    stand still (https://github.com/deepspeedai/DeepSpeed/issues/4344).

    Args:
        accelerator: an Accelerator that has prepared them.
    """
    for wrapper in accelerator._schedulers:
        for scheduler in _with_parts(wrapper.scheduler):
            for optimizer in accelerator._optimizers:
                _lead(scheduler, getattr(optimizer.optimizer, "optimizer", None))


def _lead(scheduler: Any, live: Any) -> None:
    """Point a scheduler to the optimizer inside ZeRO's wrapper, if it was made for the one it replaces."""
    stale = getattr(scheduler, "optimizer", None)
    if live is None or stale is None or live is stale:
        return
    if live.param_groups[0] is stale.param_groups[0]:
        scheduler.optimizer = live


def _with_parts(scheduler: Any) -> list[Any]:
    """Return a scheduler and those that it is made of, as SequentialLR and ChainedScheduler are."""
    return [
        scheduler,
        *(part for inner in getattr(scheduler, "_schedulers", ()) for part in _with_parts(inner)),
    ]
