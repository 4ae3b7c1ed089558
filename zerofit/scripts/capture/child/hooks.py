"""All hooks of a capture, set before the script imports anything."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from zerofit.core.upstream.accelerate import skip_data_parallel_wrapping
from zerofit.scripts.capture.child import (
    meta_weights,
    one_device,
    quiet,
    quiet_hub,
    quiet_trackers,
    stops,
    trainer_stops,
)
from zerofit.scripts.capture.child.outcome import leave_failed, place_in_script
from zerofit.scripts.on_import import when_imported

if TYPE_CHECKING:
    from zerofit.scripts.capture.child.observations import Seen


def install(seen: Seen) -> None:
    """Set the hooks that watch a script, keep it quiet, and stop it where training would begin."""
    sys.stdin = _NoInput(seen)
    when_imported("torch", one_device.install)
    when_imported("torch", lambda module: _note_seed(module, seen))
    when_imported("accelerate.state", skip_data_parallel_wrapping)
    quiet.install(seen)
    quiet_hub.install()
    quiet_trackers.install()
    if seen.spec.weights == "meta":
        when_imported("transformers.modeling_utils", lambda module: meta_weights.install(module, seen))
    stops.install(seen)
    trainer_stops.install(seen)
    _refuse_own_engine(seen)


class _NoInput(io.TextIOBase):
    """Standard input of a captured script: asking for it ends the capture."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def _asked(self) -> NoReturn:
        where = place_in_script(sys._getframe(1))
        leave_failed(self._seen, "stdin", "the script reads standard input", where=where)

    def read(self, size: int | None = -1) -> str:
        self._asked()

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        self._asked()

    def __next__(self) -> str:  # type: ignore[override]
        self._asked()

    def readable(self) -> bool:
        return True

    @property
    def buffer(self) -> Any:
        """Return what reads bytes: the same."""
        return self


def _note_seed(torch: Any, seen: Seen) -> None:
    seen.default_seed = torch.initial_seed()


def _refuse_own_engine(seen: Seen) -> None:
    """End a capture whose script makes DeepSpeed's engine itself: zerofit plans for accelerate's."""

    def initialize(*_: Any, **__: Any) -> NoReturn:
        where = place_in_script(sys._getframe(1))
        leave_failed(seen, "unsupported", "the script calls deepspeed.initialize() itself", where=where)

    when_imported("deepspeed", lambda module: setattr(module, "initialize", initialize))
