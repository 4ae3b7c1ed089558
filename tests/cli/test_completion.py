"""Completion of the command line in a real bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """\
eval "$(_ZEROFIT_COMPLETE=bash_source zerofit)"
COMP_WORDS=({words}) COMP_CWORD={place}
_zerofit_completion zerofit
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("zerofit la", "launch"),
        ("zerofit help la", "launch"),
        ("zerofit launch --zero-st", "--zero-stage"),
        ("zerofit plan --fast", "--fast --fastest"),
        ("zerofit launch --hostf", "--hostfile"),
    ],
)
def test_bash_completes_verbs_and_flags(words: str, completed: str) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    program = _PROGRAM.format(words=words, place=len(words.split()) - 1)
    ran = subprocess.run(
        ["bash", "-c", program], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert (ran.stdout.rstrip("\n"), ran.stderr) == (completed, "")
