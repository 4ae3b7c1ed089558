"""Observations of a capture's hooks."""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerofit.core.facts import GpuSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zerofit.core.capture import Capture
    from zerofit.models.trace.script_loss import ScriptLoss


@dataclass(slots=True, kw_only=True)
class CaptureSpec:
    """The parent's request: FOLDER/spec.json."""

    weights: str = "meta"
    """"meta": no model of transformers gets weights; "real": all are loaded and initialised as ever."""
    num_batches: int
    """Batches of which the shapes are recorded."""
    gpus: tuple[GpuSpec, ...] = ()
    """Those that the script is to see; none: one that stands in."""
    serve: tuple[int, int] | None = None
    """File descriptors for reading requests and writing answers; None ends after the capture."""


@dataclass(slots=True, kw_only=True)
class Observations:
    """One capture on its way."""

    folder: Path
    """Where capture.json or failure.json goes."""
    target: tuple[str, ...]
    spec: CaptureSpec
    pid: int = field(default_factory=os.getpid)
    """Of the process that captures: what it forks runs on unhindered."""
    started: float = field(default_factory=time.monotonic)
    told_gpus: str = ""
    """The GPUs, once the script has asked for their number or kind."""
    accelerators: list[Any] = field(default_factory=list)
    trainers: list[Any] = field(default_factory=list)
    models: list[tuple[Any, Any]] = field(default_factory=list)
    """Each prepared model with its Accelerator, the model as prepare() returned it."""
    all_optimizers: list[weakref.ref[Any]] = field(default_factory=list)
    all_schedulers: list[weakref.ref[Any]] = field(default_factory=list)
    loader: Any = None
    """The DataLoader that was iterated last."""
    accumulates: bool = False
    uses_local_sgd: bool = False
    evaluated: set[int] = field(default_factory=set)
    """Ids of the modules on which the script called eval()."""
    default_seed: int | None = None
    """torch's own seed, before the script set one."""
    quantized: bool = False
    saves: bool = False
    notes: list[str] = field(default_factory=list)
    on_failure: Callable[[BaseException | None], None] | None = None
    """Ends the capture with what is known already; set where a Trainer's loop has begun."""
    is_ending: bool = False
    """True if the capture is complete, and models are run by zerofit alone."""

    def note_saving(self) -> None:
        """Note that the script saves."""
        self.saves = True

    def note(self, text: str) -> None:
        """Keep a sentence for the capture's notes, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def is_here(self) -> bool:
        """True if this is the process that captures, and no fork of it."""
        return os.getpid() == self.pid

    def optimizers(self) -> Iterator[Any]:
        """Yield the optimizers that still live, oldest first."""
        yield from (one for reference in self.all_optimizers if (one := reference()) is not None)

    def schedulers(self) -> list[Any]:
        """Return the schedulers that still live, without those inside another, oldest first."""
        alive = [one for reference in self.all_schedulers if (one := reference()) is not None]
        inner = {id(part) for one in alive for part in getattr(one, "_schedulers", ())}
        return [one for one in alive if id(one) not in inner]


@dataclass(slots=True, kw_only=True)
class Live:
    """Objects that a capture keeps for tracing, in the captured process."""

    model: Any
    """The nn.Module that the script trains, unwrapped, on meta or with its weights."""
    batch: tuple[tuple[Any, ...], dict[str, Any]]
    """Arguments of the first forward pass in training: positional ones and those by name."""
    capture: Capture
    loss: ScriptLoss | None = None
    """The Trainer's, where it is not the model's own."""
    inputs: Any = None
    """The input of its compute_loss(): a batch of the DataLoader."""
    note: str = ""
    """Why the loss can't be traced; filled in where it was tried."""
