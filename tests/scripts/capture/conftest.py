"""A folder with a script that is captured by a process that stands in for the real one."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from zerofit.core.observer import SILENT, Observer
from zerofit.core.processes import has_ended
from zerofit.scripts.capture.capture import CapturedScript, capture_script

_MADE_CHILD = (sys.executable, str(Path(__file__).parent / "programs" / "made_child.py"))


class Workplace:
    """A folder with a script, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.cwd = folder / "work"
        self.cache = folder / "cache"
        self.command = _MADE_CHILD
        self.cwd.mkdir()
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "HF_HOME": str(folder)}

    def write(self, text: str, name: str = "train.py") -> None:
        (self.cwd / name).parent.mkdir(exist_ok=True)
        (self.cwd / name).write_text(textwrap.dedent(text))

    def capture(
        self,
        *arguments: str,
        limit_s: float = 30,
        name: str = "train.py",
        observer: Observer = SILENT,
    ) -> CapturedScript:
        return capture_script(
            (name, *arguments),
            environment=self.environment,
            cwd=self.cwd,
            limit_s=limit_s,
            cache_folder=self.cache,
            observer=observer,
            command=self.command,
        )

    def write_counted(self, text: str) -> None:
        """Write a script whose runs are counted, in a file that is a cache to the guard."""
        counts = f"open({str(self.cache.parent / 'runs')!r}, 'a').write('x')\n"
        self.write(counts + textwrap.dedent(text))

    def runs(self) -> int:
        """How often the script ran."""
        return len((self.cache.parent / "runs").read_text())

    def processes(self) -> list[psutil.Process]:
        """What runs in the folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(self.cwd) and not has_ended(process):
                    found.append(process)
        return found


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    place = Workplace(tmp_path)
    (tmp_path / "runs").touch()
    return place
