"""Scripts that can't be captured: each ends in time, says what to do, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from zerofit.core.errors import UserError
from zerofit.core.processes import has_ended
from zerofit.scripts.capture.capture import capture_script

_SCRIPTS = Path(__file__).parent / "programs"
_LINES = (
    "no_training.py",
    "never_prepares.py",
    "leaves.py",
    "vanishes.py",
    "takes_arguments.py --epoch-s 3",
    "raises.py --lr 1",
    "reads_input.py",
    "crashes.py",
    "starts_launcher.py",
    "starts_shell.py",
    "forks_training.py",
    "launches_notebook.py",
    "spawns_process.py",
    "spawns_ranks.py",
    "tokenizes.py",
    "removes.py",
)
_LIKE_ANOTHER = (
    *("forks_training.py", "spawns_ranks.py", "launches_notebook.py", "starts_shell.py", "spawns_process.py"),
    *("vanishes.py", "removes.py", "crashes.py"),
)
"""Scripts that start others as starts_launcher.py does, and scripts that leave as leaves.py does."""
_LIMITS_S = {"tokenizes.py": 3}
_LIMIT_S = 60


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=line.split()[0], marks=pytest.mark.slow if line in _LIKE_ANOTHER else ())
        for line in _LINES
    ],
)
def test_the_message_says_what_to_do(tmp_path: Path, golden: Callable[[str, str], None], line: str) -> None:
    target = tuple(line.split())
    shutil.copy(_SCRIPTS / target[0], tmp_path)
    (tmp_path / "old.txt").write_text("old")
    limit_s = _LIMITS_S.get(target[0], _LIMIT_S)
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        capture_script(
            target,
            environment={**os.environ, "HF_HUB_OFFLINE": "1"},
            cwd=tmp_path,
            limit_s=limit_s,
            cache_folder=tmp_path / "cache",
        )
    assert time.monotonic() - started < limit_s + 2
    assert [process.pid for process in psutil.process_iter() if _is_in(process, tmp_path)] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["cache", "old.txt", target[0]])
    assert list((tmp_path / "cache").rglob("*")) == [tmp_path / "cache" / "capturing"]
    text = str(caught.value).replace(str(tmp_path), "CWD")
    golden(text + "\n", f"capture/{target[0].removesuffix('.py')}.txt")


def _is_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder) and not has_ended(process)
    except psutil.Error:
        return False
