"""A calibration: once for real on the CPU, and with programs that fail or hang."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from zerofit.facts import Machine
from zerofit.probe.calibrate import calibrate
from zerofit.rates import Basis, Calibration, RateName

_MACHINE = Machine(gpus=(), num_cpu_cores=2, host_memory_bytes=2**30, host_memory_available_bytes=2**30)
_LINE = '{"measured": {"name": "host memory", "value": 2.0, "unit": "bytes/s", "how": "copy"}}'


def test_a_short_calibration_without_gpus_measures_host_cpu_adam_and_disk(tmp_path: Path) -> None:
    found = calibrate(_MACHINE, has_cpu_adam=False, nvme_path=str(tmp_path), short=True)
    values = {rate.name: rate.value for rate in found.rates}
    assert list(values) == [
        RateName.HOST_MEMORY,
        RateName.CPU_ADAM,
        RateName.NVME_WRITE,
        RateName.NVME_READ,
    ]
    # Far apart bounds: a unit that is wrong by a thousand falls out, a busy machine does not.
    assert 1e8 < values[RateName.HOST_MEMORY] < 2e12
    assert 1e6 < values[RateName.CPU_ADAM] < 1e11
    assert {rate.basis for rate in found.rates} == {Basis.MEASURED}
    assert "fused AdamW" in found.rates[1].source
    assert [what.partition(":")[0] for what in found.left_out] == [
        "GPU, and copies between GPU and host",
        "all-reduce between GPUs",
    ]
    assert "gloo over 2 processes" in found.left_out[1]
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
