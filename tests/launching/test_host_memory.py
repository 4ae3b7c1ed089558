"""CPU ranks whose host memory is full, in a cgroup: the run goes on as one whose GPU memory is full."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import FP32_TOLERANCE, plain_accelerate_launch
from runs import SCRIPTS, run_process

_LIMIT_BYTES = 1_300_000_000
"""Enough for the script's short batches and for half a long one, not for a whole one: 1.8 GB."""
_MOUNT = Path("/sys/fs/cgroup")


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A cgroup below this process's own, with a limit on memory; skipped where none can be made."""
    own = {
        name: path.strip("/")
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        for _, names, path in [line.split(":", 2)]
        for name in names.split(",")
    }
    name = f"zerofit-test-{os.getpid()}"
    for folder, limit in (
        (_MOUNT / "memory" / own.get("memory", "") / name, "memory.limit_in_bytes"),
        (_MOUNT / own.get("", "") / name, "memory.max"),
    ):
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(_LIMIT_BYTES))
        except OSError:
            folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no cgroup with a memory limit can be made here")


@pytest.mark.faults
def test_a_full_cgroup_halves_the_micro_batch_and_resumes(limited_group: Path, tmp_path: Path) -> None:
    script = [str(SCRIPTS / "resumable_loop.py"), "--num-steps=5", "--losses=losses.json"]
    script += ["--length=2048", "--num-short=3", "--save-at=2", "--continues"]
    plain = tmp_path / "plain"
    plain.mkdir()
    plain_accelerate_launch(script, plain)
    enters = ["sh", "-c", f'echo $$ > {limited_group}/cgroup.procs && exec "$@"', "sh"]
    zerofit = [sys.executable, "-m", "zerofit", "launch", "--cpu", "--gpus=1x24GB"]
    run = run_process([*enters, *zerofit, *script], tmp_path).check()
    (recovery,) = run.record()["recoveries"]  # type: ignore[attr-defined]
    assert re.fullmatch(
        r"rank 0 ran out of host memory, in (forward|backward) of step 4, and the kernel killed it; the "
        r"limit of its cgroup is 1\.2 GiB",
        recovery["cause"],
    )
    before, after = recovery["strategy_before"], recovery["strategy"]
    assert (before, after) == ("one GPU, micro-batches 8 x 1", "one GPU, micro-batches 4 x 2")
    resumed = tmp_path / "project" / "checkpoints" / "checkpoint_0"
    assert (recovery["resumed_from"], recovery["lost_steps"]) == (str(resumed), 1)
    assert f"out of memory with {before}: resumes from {resumed} with {after}, 1 step again" in run.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    expected = json.loads((plain / "losses.json").read_text())
    assert losses == pytest.approx(expected[2:], rel=FP32_TOLERANCE)
