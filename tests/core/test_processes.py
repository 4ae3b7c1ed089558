"""A process has ended once it runs no more, whoever takes its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from zerofit.core.processes import has_ended, is_running, wait_for_end

_TAKES_NO_EXIT_CODES = """
import os, time
child = os.fork()
if child == 0:
    time.sleep(float(os.environ["LASTS_S"]))
    os._exit(0)
print(child, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def orphans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[psutil.Process]]:
    """Two processes of a parent that takes no exit codes: one that ends at once, one after 1,000 s."""
    parents, children = [], []
    for lasts_s in ("0", "1000"):
        monkeypatch.setenv("LASTS_S", lasts_s)
        parent = subprocess.Popen(
            [sys.executable, "-c", _TAKES_NO_EXIT_CODES], stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        parents.append(parent)
        children.append(psutil.Process(int(parent.stdout.readline())))
    yield children
    for process in (*children, *parents):
        process.kill()
    for parent in parents:
        parent.communicate()


def test_a_zombie_has_ended_and_is_not_waited_for(orphans: list[psutil.Process]) -> None:
    ended, lasting = orphans
    assert wait_for_end([ended], within_s=30) == []
    assert ended.status() == psutil.STATUS_ZOMBIE
    assert psutil.pid_exists(ended.pid)
    assert has_ended(ended)
    assert not is_running(ended.pid)
    assert not has_ended(lasting)
    assert is_running(lasting.pid)
    began = time.monotonic()
    assert wait_for_end(orphans, within_s=0.2) == [lasting]
    assert wait_for_end(orphans, within_s=0) == [lasting]
    assert 0.2 <= time.monotonic() - began < 10


def test_an_own_child_is_reaped_and_an_unknown_id_is_no_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    assert wait_for_end([psutil.Process(child.pid)], within_s=30) == []
    assert not psutil.pid_exists(child.pid)
    assert not is_running(child.pid)
    assert is_running(os.getpid())
