"""Captures a script: python -m zerofit.scripts.capture.child FOLDER TARGET...

TARGET is a script or `-m module`, followed by its arguments. FOLDER contains spec.json, and receives
capture.json or failure.json.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import TypeAdapter

from zerofit.core.own_file import OwnDescriptor
from zerofit.core.upstream.accelerate import skip_data_parallel_wrapping
from zerofit.scripts.capture.child import (
    gpu_stand_in,
    loop_hooks,
    meta_weights,
    quiet_hub,
    quiet_saving,
    quiet_trackers,
    trainer_hooks,
)
from zerofit.scripts.capture.child.files import guard
from zerofit.scripts.capture.child.observations import CaptureSpec, Observations
from zerofit.scripts.capture.child.outcome import exit_failed, exit_untrained, place_in_script
from zerofit.scripts.capture.journal import SPEC
from zerofit.scripts.on_import import when_imported
from zerofit.scripts.run_target import run_target, script_frames

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the target until its training would begin, and write the result into the folder."""
    folder, *target = arguments
    spec = TypeAdapter(CaptureSpec).validate_json((Path(folder) / SPEC).read_bytes())
    pipes = tuple(map(OwnDescriptor, spec.serve or ()))
    seen = Observations(folder=Path(folder).absolute(), target=tuple(target), spec=spec, pipes=pipes)
    seen.path_denied = guard(seen.folder)
    _install(seen)
    try:
        run_target(target)
    except BaseException as error:
        if not seen.is_here:
            raise
        frames = script_frames(error.__traceback__, caller=__file__)
        exit_untrained(seen, error.with_traceback(frames))
    if not seen.is_here:
        sys.exit(0)
    exit_untrained(seen, None)


def _install(seen: Observations) -> None:
    """Install the hooks that observe a script, suppress its side effects, and stop it before training."""
    sys.stdin = _NoInput(seen)
    when_imported("torch", lambda module: gpu_stand_in.install(module, seen))
    when_imported("pynvml", lambda module: gpu_stand_in.install_for_nvml(module, seen))
    when_imported("safetensors", gpu_stand_in.install_for_safetensors)
    when_imported("torch", lambda torch: setattr(seen, "default_seed", torch.initial_seed()))
    when_imported("accelerate.state", skip_data_parallel_wrapping)
    quiet_saving.install(seen.note_saving)
    quiet_hub.install()
    quiet_trackers.install()
    if seen.spec.weights == "meta":
        when_imported("transformers.modeling_utils", lambda module: meta_weights.install(module, seen))
    loop_hooks.install(seen)
    trainer_hooks.install(seen)
    _refuse_own_engine(seen)


class _NoInput(io.TextIOBase):
    """Standard input of a captured script: reading it ends the capture."""

    def __init__(self, seen: Observations) -> None:
        self._seen = seen

    def _asked(self) -> NoReturn:
        where = place_in_script(sys._getframe(1))
        exit_failed(self._seen, "stdin", "the script reads standard input", where=where)

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
        """Return the binary stream, which is the same."""
        return self


def _refuse_own_engine(seen: Observations) -> None:
    """End the capture of a script that creates DeepSpeed's engine itself: zerofit plans for accelerate's."""

    def initialize(*_: Any, **__: Any) -> NoReturn:
        where = place_in_script(sys._getframe(1))
        exit_failed(seen, "unsupported", "the script calls deepspeed.initialize() itself", where=where)

    when_imported("deepspeed", lambda module: setattr(module, "initialize", initialize))


if __name__ == "__main__":
    main(sys.argv[1:])
