"""The catalog's rates, the file in which this machine's own are kept, and the program that measures them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.rates import Basis, Calibration, Rate, RateName, Unit
from zerofit.machine.calibration import calibrate
from zerofit.machine.gpu_catalog import load_gpus
from zerofit.machine.rates import (
    calibration_file,
    catalog_rates,
    probe_rates,
    read_calibration,
    write_calibration,
)
from zerofit.machine.versions import probe_versions

_MACHINE = Machine(gpus=(), num_cpu_cores=2, host_memory_bytes=2**30, host_memory_available_bytes=2**30)
_MEASURED = Rate(
    name=RateName.HOST_MEMORY, value=2e10, unit=Unit.BYTES_PER_S, basis=Basis.MEASURED, source="copy"
)


def test_the_catalog_has_a_rate_of_every_name_for_the_oldest_gpu() -> None:
    assert [catalog_rates().of(name).name for name in RateName] == list(RateName)


def test_a_rate_of_one_gpu_names_all_that_the_driver_calls_it() -> None:
    known = {(), *(gpu.driver_names for gpu in load_gpus())}
    assert {rate.gpus for rate in catalog_rates().rates} <= known


def test_each_rate_of_the_catalog_is_plausible_and_says_where_it_is_from() -> None:
    for rate in catalog_rates().rates:
        assert rate.value > 0, rate
        assert rate.unit is not Unit.FRACTION or rate.value < 1, rate
        assert rate.basis is not Basis.MEASURED, rate
        is_cited = "https://" in rate.source or rate.source.startswith("measured: benchmarks/measured/")
        assert is_cited or rate.basis is Basis.ASSUMPTION, rate


def test_a_calibration_is_read_as_it_was_written_and_goes_first(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert read_calibration(_MACHINE, environ=environ) == ()
    path = write_calibration(_MACHINE, (_MEASURED,), environ=environ)
    assert list((tmp_path / "zerofit").iterdir()) == [path]
    assert read_calibration(_MACHINE, environ=environ) == (_MEASURED,)
    assert probe_rates(_MACHINE, environ=environ).of(RateName.HOST_MEMORY) == _MEASURED
    assert probe_rates(_MACHINE, environ=environ).of(RateName.CPU_ADAM) in catalog_rates().rates


def test_a_machine_with_other_gpus_has_a_calibration_of_its_own(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    other = replace(_MACHINE, gpus=(GpuSpec(name="T4", memory_bytes=2**34),))
    assert calibration_file(_MACHINE, environ=environ) != calibration_file(other, environ=environ)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"machine": {}, "rates": [{"name": "no such rate"}]}',
        "\xff",
    ],
)
def test_a_broken_calibration_counts_as_none_aloud(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    path = write_calibration(_MACHINE, (_MEASURED,), environ=environ)
    path.write_text(text, encoding="latin-1")
    assert read_calibration(_MACHINE, environ=environ) == ()
    told = capsys.readouterr().err
    assert told.startswith(f"zerofit: {path} is ignored: ")
    assert told.endswith("; zerofit doctor --calibrate measures again\n")


@pytest.mark.parametrize(
    "changed",
    [
        {"value": -5.0},
        {"value": 0.0},
        {"value": math.nan},
        {"value": math.inf},
    ],
)
def test_a_calibration_of_what_no_machine_achieves_counts_as_none(
    tmp_path: Path, changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    write_calibration(_MACHINE, (_MEASURED, replace(_MEASURED, **changed)), environ=environ)
    assert read_calibration(_MACHINE, environ=environ) == ()
    assert " is ignored: " in capsys.readouterr().err


def test_another_torch_has_a_calibration_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    here = calibration_file(_MACHINE, environ=environ)
    other = replace(probe_versions(), torch="0.1")
    monkeypatch.setattr("zerofit.machine.rates.probe_versions", lambda: other)
    assert calibration_file(_MACHINE, environ=environ) != here


def test_a_write_that_fails_leaves_the_old_calibration_and_no_rest(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    path = write_calibration(_MACHINE, (_MEASURED,), environ=environ)
    unwritable = replace(_MEASURED, source=b"no text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_calibration(_MACHINE, (unwritable,), environ=environ)
    assert list(path.parent.iterdir()) == [path]
    assert read_calibration(_MACHINE, environ=environ) == (_MEASURED,)


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
    assert found.left_out == ("the rest: its program ended with 1: no more",)


def test_what_was_measured_before_it_hangs_is_kept() -> None:
    found = _told(f"import time; print('{_LINE}', flush=True); time.sleep(60)", timeout_s=3)
    assert [rate.value for rate in found.rates] == [2.0]
    assert found.left_out == ("the rest: its program did not end within 3 s",)


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
