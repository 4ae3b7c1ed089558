"""Observations: the state collected by a capture's hooks."""

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
    from zerofit.core.own_file import OwnDescriptor
    from zerofit.models.trace.script_loss import ScriptLoss


@dataclass(slots=True, kw_only=True)
class CaptureSpec:
    """The parent's request: FOLDER/spec.json."""

    weights: str = "meta"
    """"meta": transformers' models get no weights; "real": all are loaded and initialised as usual."""
    num_batches: int
    """Number of batches whose shapes are recorded."""
    gpus: tuple[GpuSpec, ...] = ()
    """GPUs that the script sees; empty: a generic one."""
    serve: tuple[int, int] | None = None
    """File descriptors for requests and answers; None ends after the capture."""


@dataclass(slots=True, kw_only=True)
class Observations:
    """A capture in progress."""

    folder: Path
    """The folder for capture.json or failure.json."""
    target: tuple[str, ...]
    spec: CaptureSpec
    pipes: tuple[OwnDescriptor, ...] = ()
    """For requests and answers; the script may have closed them."""
    pid: int = field(default_factory=os.getpid)
    """Of the capturing process: processes that it forks are not hindered."""
    path_denied: Callable[[BaseException], str] | None = None
    """Returns the path that the capture was kept from writing when an error was raised, or ""."""
    started: float = field(default_factory=time.monotonic)
    told_gpus: str = ""
    """The GPUs, once the script has asked for their number or kind."""
    accelerators: list[Any] = field(default_factory=list)
    trainers: list[Any] = field(default_factory=list)
    models: list[tuple[Any, Any]] = field(default_factory=list)
    """Each prepared model with its Accelerator, the model as returned by prepare()."""
    all_optimizers: list[weakref.ref[Any]] = field(default_factory=list)
    all_schedulers: list[weakref.ref[Any]] = field(default_factory=list)
    loader: Any = None
    """The DataLoader iterated last."""
    accumulates: bool = False
    uses_local_sgd: bool = False
    evaluated: set[int] = field(default_factory=set)
    """Ids of modules on which the script called eval()."""
    default_seed: int | None = None
    """torch's own seed before the script set one."""
    quantized: bool = False
    stands_for: list[dict[str, Any]] = field(default_factory=list)
    """The quantization_config of the model being loaded, if its layers stay wide here."""
    saves: bool = False
    notes: list[str] = field(default_factory=list)
    on_failure: Callable[[BaseException | None], None] | None = None
    """Ends the capture with what is known so far; set when a Trainer's loop has begun."""
    is_ending: bool = False
    """True if the capture is complete, and only zerofit runs models."""

    def note_saving(self) -> None:
        """Record that the script saves."""
        self.saves = True

    def note(self, text: str) -> None:
        """Add a sentence to the capture's notes, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def is_here(self) -> bool:
        """True if this is the capturing process rather than a fork of it."""
        return os.getpid() == self.pid

    def optimizers(self) -> Iterator[Any]:
        """Yield the living optimizers, oldest first."""
        yield from (optimizer for reference in self.all_optimizers if (optimizer := reference()) is not None)

    def schedulers(self) -> list[Any]:
        """Return the living schedulers, without those inside another, oldest first."""
        alive = [scheduler for reference in self.all_schedulers if (scheduler := reference()) is not None]
        inner = {id(part) for scheduler in alive for part in getattr(scheduler, "_schedulers", ())}
        return [scheduler for scheduler in alive if id(scheduler) not in inner]


@dataclass(slots=True, kw_only=True)
class Live:
    """Objects kept in the captured process for tracing."""

    model: Any
    """The trained nn.Module, unwrapped, on meta or with its weights."""
    batch: tuple[tuple[Any, ...], dict[str, Any]]
    """Arguments of the first training forward pass: positional and by name."""
    capture: Capture
    loss: ScriptLoss | None = None
    """The Trainer's, if it differs from the model's own."""
    inputs: Any = None
    """The input of its compute_loss(): a batch of the DataLoader."""
    note: str = ""
    """Why the loss can't be traced; set when it was tried."""
    evaluated: Any = None
    """The first batch that the Trainer would evaluate; None if it does not evaluate."""
    trainer: Any = None
    """The Trainer; None for the script's own loop."""
