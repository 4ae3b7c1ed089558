"""Accelerators with a plan's hooks, in this process: the ground of tests of single hooks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from zerofit.training.changes import Changes
from zerofit.training.settings import Settings

NOTHING = Settings(
    uses_deepspeed=False,
    on_cpu=True,
    micro_batch_size=None,
    global_batch_size=None,
    trainer_accumulates=False,
    precision=None,
    precision_is_default=True,
    gradient_accumulation_steps=None,
    gradient_clipping=None,
    gradient_checkpointing=None,
    checkpoint_every=1,
    optimizer=None,
    attention=None,
    freeze=(),
    lora=None,
    quantization=None,
    tf32=None,
    liger=False,
    group_by_length=False,
)
"""A plan that leaves everything to the script."""


def settings(**wanted: Any) -> Settings:
    """Return the settings of a plan that wants these alone."""
    return replace(NOTHING, **wanted)


def own_class() -> Any:
    """Return a subclass of Accelerator to hook, so that accelerate's own stays as it is."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState(cpu=True)
    return type("Accelerator", (Accelerator,), {"_zerofit_by_script": True})


def quiet() -> Changes:
    """Return a list of changes that prints nothing."""
    return Changes(announce=False)
