"""Ctrl-C while a script is captured."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from running_launches import assert_all_gone
from runs import environment


def test_ctrl_c_during_a_capture_prints_a_sentence_and_leaves_no_child(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nopen('waits', 'w').close()\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "zerofit", "launch", "--dry-run", "--gpus", "1xH100", "train.py"],
        cwd=tmp_path,
        env=environment(XDG_CACHE_HOME=str(tmp_path / "cache")),
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "waits").exists():
        assert process.poll() is None
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (
        130,
        "zerofit: capturing what train.py trains, up to its first step ...\n\n"
        "zerofit: stopped by Ctrl-C; no training was started\n",
    )
    assert_all_gone(children)
