"""A calibration: once for real on the CPU, and with programs that fail or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerofit.core.facts import Machine
from zerofit.core.rates import Basis, Calibration, RateName
from zerofit.machine.calibration import calibrate

_MACHINE = Machine(gpus=(), num_cpu_cores=2, host_memory_bytes=2**30, host_memory_available_bytes=2**30)
_LINE = '{"measured": {"name": "host memory", "value": 2.0, "unit": "bytes/s", "how": "copy"}}'


@pytest.mark.slow
def test_a_short_calibration_without_gpus_measures_host_and_disk(tmp_path: Path) -> None:
    found = calibrate(_MACHINE, has_cpu_adam=False, nvme_path=str(tmp_path), short=True)
    values = {rate.name: rate.value for rate in found.rates}
    assert list(values) == [
        RateName.HOST_MEMORY,
        RateName.NVME_WRITE,
        RateName.NVME_READ,
    ]
    # Far apart bounds: a unit that is wrong by a thousand falls out, a busy machine does not.
    assert 1e8 < values[RateName.HOST_MEMORY] < 2e12
    assert {rate.basis for rate in found.rates} == {Basis.MEASURED}
    assert [what.partition(":")[0] for what in found.left_out] == [
        "GPU, and copies between GPU and host",
        "CPU Adam",
        "all-reduce between GPUs",
    ]
    # Another program than DeepSpeedCPUAdam: said, and kept as no rate.
    assert "torch's fused AdamW, another program, stepped" in found.left_out[1]
    assert "gloo over 2 processes" in found.left_out[2]
    assert list(tmp_path.iterdir()) == []


def _told(program: str, *, timeout_s: float = 60) -> Calibration:
    return calibrate(
        _MACHINE,
        has_cpu_adam=False,
        environ=os.environ,
        program=(sys.executable, "-c", program),
        timeout_s=timeout_s,
    )


def test_what_was_measured_before_a_failure_is_kept() -> None:
    found = _told(f"print('{_LINE}', flush=True); raise SystemExit('no more')")
    assert [rate.value for rate in found.rates] == [2.0]
    assert found.left_out == ("the rest: the program ended with 1: no more",)


def test_what_was_measured_before_it_hangs_is_kept() -> None:
    found = _told(f"import time; print('{_LINE}', flush=True); time.sleep(60)", timeout_s=3)
    assert [rate.value for rate in found.rates] == [2.0]
    assert found.left_out == ("the rest: it did not end within 3 s",)


def test_ctrl_c_ends_the_program_and_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, {str(pid_file)!r}])"

    def interrupt(process: subprocess.Popen[str], timeout: float) -> None:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _told(program)
    pid = int(pid_file.read_text())
    end = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < end:
        time.sleep(0.01)
    still_runs = _runs(pid)
    if still_runs:
        os.kill(pid, signal.SIGKILL)
    assert not still_runs


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
