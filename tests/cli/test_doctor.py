"""zerofit doctor, run for real, and the form of its output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from runs import RunZerofit
from small_runs import NO_GPU
from zerofit_in_process import run_in_process

from zerofit.cli.doctor import doctor, doctor_json, doctor_text, is_usable, with_unreadable_gpus
from zerofit.core.errors import UserError
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.rank_observation import Phase
from zerofit.core.rates import Basis, Calibration, Rate, RateName, Unit
from zerofit.core.strategy import Strategy
from zerofit.machine import probe_toolchain
from zerofit.machine.doctor import CheckupLine, Status
from zerofit.machine.observations import Observation, ObservedPeak, write_observation
from zerofit.machine.probe_toolchain import ask_torch
from zerofit.machine.toolchain import BuildLock, DeepSpeedOp

_TOPICS = [
    "python",
    "zerofit",
    "torch",
    "accelerate",
    "deepspeed",
    "transformers",
    "huggingface_hub",
    "peft",
    "bitsandbytes",
    "GPUs",
    "driver",
    "torch CUDA",
    "nvcc",
    "C++ compiler",
    "Python headers",
    "ninja",
    "libaio",
    "op cpu_adam",
    "op fused_adam",
    "op async_io",
    "build locks",
    "CPU cores",
    "host memory",
    "memlock",
    "/dev/shm",
    "current folder",
    "Hugging Face cache",
    "port 29500",
    ".deepspeed_env",
]


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """Return what torch and DeepSpeed told of themselves, once asked: a process imports both."""
    return []


@pytest.fixture(scope="module")
def run_doctor(
    reports: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Return a function that runs `zerofit doctor` in a folder; only the first run asks torch."""
    home = str(tmp_path_factory.mktemp("home"))
    # A machine with GPUs shows none, and the builds and caches of the user are left out, so that the lines
    # are the same everywhere.
    environment = {"CUDA_VISIBLE_DEVICES": "", "HOME": home, "XDG_CACHE_HOME": home}

    def ask_once(*command: Any, **settings: Any) -> dict[str, Any]:
        if not reports:
            reports.append(ask_torch(*command, **settings))
        return reports[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        patch.setattr(probe_toolchain, "ask_torch", ask_once)
        yield lambda folder, *flags: run_in_process(("doctor", *flags), cwd=folder, environment=environment)


@pytest.fixture(scope="module")
def document(run_doctor: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = run_doctor(tmp_path_factory.mktemp("folder"), "--json")
    assert (result.returncode, result.stderr) == (0, "")
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_report_of_the_real_torch_and_deepspeed(
    document: dict[str, Any], reports: list[dict[str, Any]]
) -> None:
    (report,) = reports
    assert (report["torch"]["error"], report["deepspeed"]["error"]) == (None, None)
    ops = {op["name"]: op["is_compatible"] for op in report["deepspeed"]["answer"]}
    assert list(ops) == ["cpu_adam", "fused_adam", "async_io"]
    assert ops["cpu_adam"] is True


def test_json_has_version_machine_versions_and_every_line(document: dict[str, Any]) -> None:
    assert list(document) == ["version", "machine", "versions", "lines"]
    assert document["version"] == 1
    assert document["machine"]["gpus"] == []
    assert document["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert [line["topic"] for line in document["lines"]] == _TOPICS
    assert {tuple(line) for line in document["lines"]} == {("status", "topic", "found", "why", "fix")}


def test_text_is_one_aligned_line_a_check(run_doctor: Any, tmp_path: Path) -> None:
    result = run_doctor(tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    row = re.compile(r"(ok     |warning)  (.{18})  (\S.*)")
    below = re.compile(r"         (why|fix): \S.*")
    lines = result.stdout.splitlines()
    assert [match[2].strip() for line in lines if (match := row.fullmatch(line))] == _TOPICS
    assert [line for line in lines if not row.fullmatch(line) and not below.fullmatch(line)] == []
    assert list(tmp_path.iterdir()) == []


_LINES = (
    CheckupLine(status=Status.OK, topic="ninja", found="/usr/bin/ninja"),
    CheckupLine(status=Status.WARNING, topic="op async_io", found="can't be compiled", why="W", fix="F"),
)


def test_text_of_lines() -> None:
    assert click.unstyle(doctor_text(_LINES)) == (
        "ok       ninja        /usr/bin/ninja\n"
        "warning  op async_io  can't be compiled\n"
        "         why: W\n"
        "         fix: F"
    )


def test_gpus_that_can_not_be_read_are_a_warning() -> None:
    lines = (CheckupLine(status=Status.WARNING, topic="GPUs", found="none", why="W", fix="F"), *_LINES)
    error = UserError("gpus-unreadable", "S", found="MIG-1", why="no word", fix="say --cpu")
    assert with_unreadable_gpus(lines, None) == lines
    assert with_unreadable_gpus(lines, error) == (
        CheckupLine(status=Status.WARNING, topic="GPUs", found="MIG-1", why="no word", fix="say --cpu"),
        *_LINES,
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nvme-path .", "--nvme-path needs --calibrate, which measures the disk"),
        ("--observations --calibrate", "--observations lists what runs needed, without measuring"),
        ("--calibrate --nvme-path no/such/folder", "error[nvme-path-unusable]: --nvme-path is not writable"),
    ],
)
def test_flags_that_can_not_be_followed(
    run_zerofit: RunZerofit, tmp_path: Path, line: str, said: str
) -> None:
    finished = run_zerofit("doctor", *line.split(), cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert said in finished.stderr


@pytest.mark.parametrize(
    ("is_in_wheel", "is_compiled", "lock", "expected"),
    [
        (False, False, None, False),
        (True, False, None, True),
        (False, True, None, True),
        (False, True, "/cache/py311_cpu/cpu_adam/lock", False),
        (False, True, "/cache/py311_cpu/async_io/lock", True),
    ],
)
def test_an_op_is_usable_where_it_is_built_and_no_build_of_it_is_locked(
    is_in_wheel: bool, is_compiled: bool, lock: str | None, expected: bool
) -> None:
    op = DeepSpeedOp(
        name="cpu_adam",
        is_in_wheel=is_in_wheel,
        is_compiled=is_compiled,
        is_compatible=True,
        needs_nvcc=False,
    )
    locks = (BuildLock(path=lock, age_s=1.0, is_held=False),) if lock else ()
    assert is_usable("cpu_adam", (op,), locks) is expected


_RATE = Rate(
    name=RateName.HOST_MEMORY, value=2e10, unit=Unit.BYTES_PER_S, basis=Basis.MEASURED, source="copy"
)


@pytest.mark.parametrize("is_writable", [True, False])
def test_measurements_are_printed_even_if_they_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_writable: bool
) -> None:
    cache = tmp_path / "cache"
    if not is_writable:
        cache.write_text("a file in the folder's place")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(
        "zerofit.cli.doctor.measure", lambda *_, **__: Calibration(rates=(_RATE,), left_out=())
    )
    versions = Versions(python="3.11", zerofit="1")
    toolchain = SimpleNamespace(ops=(), build_locks=())
    monkeypatch.setattr("zerofit.cli.doctor._examine", lambda: (NO_GPU, versions, toolchain, _LINES))
    result = CliRunner().invoke(doctor, ["--calibrate"])
    assert result.exit_code == 0
    assert result.stdout.endswith("host memory: 20 GB/s (copy)\n")
    told = result.stderr.splitlines()[-1]
    if is_writable:
        assert told.startswith(f"zerofit: wrote {cache}/zerofit/rates-")
    else:
        assert told.startswith("zerofit: the measurements can't be stored for zerofit plan: ")


def test_a_calibration_stands_in_the_json() -> None:
    calibration = Calibration(rates=(), left_out=("disk: no --nvme-path",))
    text = doctor_json(NO_GPU, Versions(python="3.11", zerofit="1"), (), calibration)
    assert json.loads(text)["calibration"] == {"rates": [], "left_out": ["disk: no --nvme-path"]}


def test_observations_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    none = CliRunner().invoke(doctor, ["--observations"])
    assert (none.exit_code, none.stdout) == (0, "no run has been observed on this machine\n")
    observed = Observation(
        at="2026-11-20T10:00:00+00:00",
        script="train.py",
        subject="",
        strategy=Strategy(),
        topology=Topology(world_size=2),
        gpus=("NVIDIA A10",) * 2,
        versions=Versions(python="3.11", zerofit="1"),
        num_steps=12,
        is_out_of_memory=False,
        peaks=(ObservedPeak(phase=Phase.BACKWARD, allocated_bytes=2**30, reserved_bytes=2**31),),
        host_bytes=2**30,
        step_time_s=0.5,
        predicted_bytes=2**31,
    )
    write_observation(observed)
    listed = CliRunner().invoke(doctor, ["--observations"])
    head, row = ([cell.strip() for cell in line.split("  ") if cell] for line in listed.stdout.splitlines())
    assert head[0] == "observed"
    assert row == [
        *("2026-11-20", "train.py", "PyTorch without DeepSpeed", "2 GPU", "12"),
        *("2.0 GiB", "2.0 GiB", "1.0 GiB", "0.5 s", "-"),
    ]
    document = json.loads(CliRunner().invoke(doctor, ["--observations", "--json"]).stdout)
    assert document["version"] == 1
    assert document["observations"][0]["peaks"] == [
        {"phase": "backward", "allocated_bytes": 2**30, "reserved_bytes": 2**31}
    ]
