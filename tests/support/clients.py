"""Stand-ins for programs that are not here: a scheduler's client that answers as a test says."""

from __future__ import annotations

import os
from pathlib import Path


def path_with(folder: Path, *names: str, script: str) -> str:
    """Return a PATH with programs of these names, which run a shell script; they are in FOLDER/bin."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in names:
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    return f"{programs}:{os.environ['PATH']}"
