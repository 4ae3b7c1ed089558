"""Logs the measured memory peaks beside the predicted one to the run's trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.units import GIB
from zerofit.core.upstream.transformers import tracker_callbacks
from zerofit.machine.this_node import process_bytes
from zerofit.training.reporting.record import gpu_peaks
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from zerofit.core.plan import Plan
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


def memory_metrics(plan: Plan) -> dict[str, float]:
    """Return this rank's peaks since its start, in GiB, under the names for trackers.

    Args:
        plan: the run's; without an estimate, or on the CPU, there is no predicted peak.
    """
    allocated, reserved = gpu_peaks()
    estimate = None if plan.topology.on_cpu else plan.estimate
    found = {
        "peak_allocated": allocated,  # live tensors, as predicted
        "peak_reserved": reserved,
        "predicted_peak_allocated": None if estimate is None else estimate.device.most_tensors,
        "peak_host": process_bytes("VmHWM"),
    }
    return {f"zerofit/{name}_gib": size / GIB for name, size in found.items() if size is not None}


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Add the peaks to Accelerator.log()."""

    def log(original: Any, self: Any, values: Any, *args: Any, **named: Any) -> Any:
        if self.trackers:
            values = {**memory_metrics(settings.plan), **values}
        return original(self, values, *args, **named)

    return {"log": log}


def trainer_wrappers(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Add the peaks to the logs of transformers' tracker callbacks; printed output is unchanged."""

    def train(original: Any, self: Any, *args: Any, **named: Any) -> Any:
        trackers = tracker_callbacks()
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, trackers) and "on_log" not in vars(
                callback
            ):  # train() may be called twice
                wrap(callback, "on_log", on_log)
        return original(self, *args, **named)

    def on_log(original: Any, *args: Any, logs: Any = None, **named: Any) -> Any:
        return original(*args, logs={**memory_metrics(settings.plan), **(logs or {})}, **named)

    return {"train": train}
