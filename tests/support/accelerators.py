"""Accelerators with a plan's hooks, in this process: the ground of tests of single hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from captures import LOOP
from small_runs import PLAN as PLAN

from zerofit.core.capture import CapturedModel
from zerofit.core.plan import Origin, Reason
from zerofit.core.strategy import Engine, Strategy
from zerofit.training.changes import Changes
from zerofit.training.hooks import install_accelerator
from zerofit.training.settings import AppliedSettings
from zerofit.training.wrapping import Wrapper, wrap


def settings(
    *,
    global_batch_size: int | None = None,
    trainer_accumulates: bool = False,
    uses_deepspeed: bool = False,
    uses_fsdp2: bool = False,
    precision_is_default: bool = True,
    captured: CapturedModel | None = None,
    recovers: bool = False,
    **strategy: Any,
) -> AppliedSettings:
    """Return the settings of a plan that wants these alone; the others are fields of Strategy."""
    engine = Engine.FSDP2 if uses_fsdp2 else Engine.DEEPSPEED if uses_deepspeed else Engine.NATIVE
    wanted = Strategy(engine=engine, **strategy)
    default = Reason(field="precision", value="", origin=Origin.DEFAULT, why="")
    reasons = (default,) if precision_is_default else ()
    plan = replace(PLAN, strategy=wanted, recovers=recovers, reasons=reasons)
    if captured is not None:
        plan = replace(plan, capture=replace(LOOP, model=captured))
    return AppliedSettings(
        plan=plan,
        strategy=wanted,
        global_batch_size=global_batch_size,
        trainer_accumulates=trainer_accumulates,
    )


def forget_accelerators() -> None:
    """Let the next Accelerator be made as in a new process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def own_class() -> Any:
    """Return a subclass of Accelerator to hook, so that accelerate's own stays as it is."""
    forget_accelerators()
    PartialState(cpu=True)
    return type("Accelerator", (Accelerator,), {"_zerofit_by_script": True})


def quiet() -> Changes:
    """Return a list of changes that prints nothing."""
    return Changes(announce=False)


def wrap_all(owner: Any, wrappers: Mapping[str, Wrapper]) -> None:
    """Wrap the methods of a class by those of one subject alone."""
    for name, wrapper in wrappers.items():
        wrap(owner, name, wrapper)


def hooked(**wanted: Any) -> tuple[Any, Changes]:
    """Return a subclass of Accelerator with all hooks of a plan, and its list of changes."""
    accelerator_class, changes = own_class(), quiet()
    install_accelerator(accelerator_class, settings(**wanted), changes)
    return accelerator_class, changes
