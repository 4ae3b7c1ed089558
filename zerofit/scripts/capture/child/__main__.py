"""Captures a script: python -m zerofit.scripts.capture.child FOLDER TARGET...

TARGET is a script or `-m module`, then its arguments. FOLDER holds spec.json, and gets capture.json or
failure.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from zerofit.scripts.capture.child.files import guard
from zerofit.scripts.capture.child.hooks import install
from zerofit.scripts.capture.child.observations import Seen, Spec
from zerofit.scripts.capture.child.outcome import leave_for
from zerofit.scripts.run_target import run_target, script_frames

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the target until its training would begin, and leave what was seen in the folder."""
    folder, *target = arguments
    seen = Seen(folder=Path(folder).absolute(), target=tuple(target), spec=_spec_in(Path(folder)))
    guard(seen.folder)
    install(seen)
    try:
        run_target(target)
    except BaseException as error:
        if not seen.is_here:
            raise
        frames = script_frames(error.__traceback__, caller=__file__)
        leave_for(seen, error.with_traceback(frames))
    if not seen.is_here:
        sys.exit(0)
    leave_for(seen, None)


def _spec_in(folder: Path) -> Spec:
    document = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    serve = document.get("serve")
    return Spec(
        weights=document["weights"],
        num_batches=document["num_batches"],
        serve=(serve[0], serve[1]) if serve is not None else None,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
