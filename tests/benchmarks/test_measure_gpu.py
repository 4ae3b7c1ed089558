"""measure_gpu.py: flags, continuing an earlier run, Ctrl-C, and a whole run on the CPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import measure_gpu
import pytest
from gpu_truth.cases import ACCURACY_ON_CPU
from gpu_truth.failures import find_failures
from gpu_truth.ladder import LADDER_ON_CPU
from gpu_truth.rank_cases import RANKS_ON_CPU
from gpu_truth.regret import QUESTIONS_ON_CPU
from gpu_truth.results import Results, Section, results_from_json
from gpu_truth.session import cases_of
from gpu_truth.verdict import is_whole
from kept_cases import SKIPPED, keep_as_done
from measuring.results import TrialOutcome, TrialState

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "measure_gpu.py"
PYTHONPATH = str(PROGRAM.parents[1])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
"""zerofit is found as on a machine where it is not installed."""
MISSING = """
import sys
sys.modules.update(dict.fromkeys(("pynvml", "matplotlib")))
"""


def _run(*flags: str, cache: Path | None = None, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the program; traces go to a cache that is not the user's, where one is given."""
    return subprocess.run(
        [sys.executable, str(PROGRAM), *flags],
        env={**ENVIRONMENT, **({"XDG_CACHE_HOME": str(cache)} if cache else {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def _read(folder: Path) -> Results:
    return results_from_json((folder / "cpu.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "one of the arguments --out --predict-anew is required"),
        (("--out", "x", "--budget", "9"), "argument --budget: '9' is no time: say it as 540s, 9m or 1h"),
        (("--out", "x", "--budget", "0m"), "argument --budget: '0m' is no time: say it as 540s, 9m or 1h"),
        (
            ("--out", "x", "--sections", "ranks,memory"),
            "argument --sections: there is no section memory: "
            "they are context, accuracy, ranks, regret, ladder",
        ),
        (("--out", "x", "--lookahead", "-1"), "argument --lookahead: '-1' is no number: say 0, 1 or more"),
        (("--out", "x", "--fast"), "unrecognized arguments: --fast"),
    ],
)
def test_a_wrong_flag_ends_it_with_2(
    flags: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *flags])
    with pytest.raises(SystemExit) as ended:
        measure_gpu.main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err.splitlines()[-1] == f"measure_gpu.py: error: {said}"


def test_without_a_gpu_it_asks_for_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--out", str(tmp_path)])
    assert measure_gpu.main() == 2
    assert capsys.readouterr().err.startswith("error[no-gpu-to-measure]: there is no GPU to measure\n")


def test_a_dry_run_prints_everything_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--cpu", "--out", str(tmp_path / "out"), "--dry-run")
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *flags])
    assert measure_gpu.main() == 0
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[1:]] == [
        "context",
        "calibration",
        "accuracy",
        *(one.key for one in ACCURACY_ON_CPU),
        "ranks",
        *(one.key for one in RANKS_ON_CPU),
        "regret",
        *(one.key for one in QUESTIONS_ON_CPU),
        "ladder",
        *(one.key for one in LADDER_ON_CPU),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("built_ops")
def test_a_bare_host_without_nvml_and_matplotlib_gets_its_tables(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(MISSING, encoding="utf-8")
    found = subprocess.run(
        [
            sys.executable,
            PROGRAM,
            "--cpu",
            "--out",
            tmp_path / "out",
            "--sections",
            "accuracy",
            "--budget",
            "1s",
        ],
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join((str(tmp_path), PYTHONPATH))},
        capture_output=True,
        text=True,
    )
    assert found.stderr.splitlines()[1:] == [
        "measure_gpu: no plot: matplotlib is missing",
        "measure_gpu: exit 1: nothing was measured within the budget",
    ]
    assert (found.returncode, found.stdout.startswith("CPU, ")) == (1, True)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"cpu.json", "cpu.txt"}


@pytest.mark.parametrize(
    ("state", "sections", "expected"),
    [
        (TrialState.FAILED, (Section.ACCURACY,), True),
        (TrialState.FAILED, (Section.RANKS, Section.LADDER), False),
        (TrialState.OUT_OF_MEMORY, (Section.ACCURACY,), False),
        (TrialState.CANNOT_RUN, (Section.ACCURACY,), False),
    ],
)
def test_a_case_that_failed_fails_the_run_of_its_section(
    tmp_path: Path, state: TrialState, sections: tuple[Section, ...], expected: bool
) -> None:
    first, second, *_ = (one.key for one in ACCURACY_ON_CPU)
    keep_as_done(tmp_path, {first}, TrialOutcome(state=state, reason="why"))
    keep_as_done(tmp_path, {second})
    found = find_failures(_read(tmp_path), sections, {})
    assert bool(found) is expected
    assert [(one.num_failed, one.num_ended, one.first_error) for one in found] == (
        [(1, 2, f"{first}: failed: why")] if expected else []
    )


@pytest.mark.slow
def test_a_run_goes_on_where_one_ended(tmp_path: Path) -> None:
    left = ACCURACY_ON_CPU[1]
    out = tmp_path / "out"
    keep_as_done(out, {one.key for one in ACCURACY_ON_CPU} - {left.key})
    flags = ("--cpu", "--out", str(out), "--sections", "accuracy", "--budget", "5m")
    found = _run(*flags, cache=tmp_path / "cache")
    assert found.returncode == 0
    assert re.fullmatch(r"measure_gpu: accuracy: \S+ s\n", found.stderr)
    results = _read(out)
    measured = {one.case.key: one for one in results.accuracy if one.outcome != SKIPPED}
    assert set(measured) == {left.key}
    one = measured[left.key]
    assert one.outcome.state is TrialState.DONE
    assert one.predicted is not None
    assert one.outcome.measured is not None
    assert one.outcome.measured.counted is not None
    assert one.predicted.parts.weights == one.outcome.measured.counted.weights
    assert results.not_run == ()
    assert {file.name for file in out.iterdir()} == {"cpu.json", "cpu.txt", "cpu.png"}
    assert found.stdout.startswith("CPU, ")
    assert f"accuracy: 1 done, {len(ACCURACY_ON_CPU) - 1} out of memory\n" in found.stdout
    assert (out / "cpu.txt").read_text(encoding="utf-8").startswith(found.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("built_ops")
def test_ctrl_c_keeps_what_was_measured_and_exits_130(tmp_path: Path) -> None:
    out, logs = tmp_path / "out", tmp_path / "logs"
    keep_as_done(out, {ACCURACY_ON_CPU[0].key})
    flags = ["--cpu", "--out", str(out), "--logs", str(logs), "--sections", "accuracy", "--budget", "5m"]
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *flags],
        env={**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ahead = logs / "accuracy" / f"{ACCURACY_ON_CPU[2].key}.log"
    until = time.monotonic() + 120
    while not ahead.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert ahead.exists()
    time.sleep(1)  # the one before it has its turn now
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (130, False), errors
    results = _read(out)
    assert [one.case.key for one in results.accuracy] == [ACCURACY_ON_CPU[0].key]
    assert results.not_run == ("accuracy interrupted",)
    assert output.startswith("CPU, ")


@pytest.mark.evidence
@pytest.mark.timeout(900)
def test_the_whole_harness_runs_on_the_cpu_within_ten_minutes(tmp_path: Path) -> None:
    start = time.monotonic()
    found = _run("--cpu", "--out", str(tmp_path), "--budget", "9m", timeout_s=800)
    assert time.monotonic() - start < 600
    assert found.returncode == 0, found.stderr
    results = _read(tmp_path)
    assert results.not_run == ()
    assert results.calibration is not None
    assert results.ladder is not None
    ended = {
        Section.ACCURACY: {one.case.key: one.outcome.state for one in results.accuracy},
        Section.RANKS: {one.case.key: one.outcome.state for one in results.ranks},
        Section.LADDER: {one.name: one.outcome.state for one in results.ladder.rungs},
    }
    for section, states in ended.items():
        keys = [one.key for one in cases_of(section, on_cpu=True)]
        assert states == dict.fromkeys(keys, TrialState.DONE)
    assert [one.key for one in results.regret if is_whole(one)] == [one.key for one in QUESTIONS_ON_CPU]
