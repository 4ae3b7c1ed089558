"""zerofit bench ladder, run as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter
from runs import RunZerofit

from zerofit.cli.bench import ladder
from zerofit.core.errors import UserError
from zerofit.measuring import ladder as measured_ladder
from zerofit.measuring.ladder import DEFAULT_RUNGS, Ladder
from zerofit.measuring.predict import Predictor
from zerofit.measuring.results import TensorBytes, TrialMeasurement, TrialOutcome, TrialState

_TINY = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
_SIZES = ("--model", "tiny", "--batch-size", "2", "--seq-len", "8", "--cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the config of a tiny model."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(_TINY))
    return tmp_path


_MEASURED = TrialMeasurement(
    process_bytes=1000,
    process_peak_bytes=2000,
    step_times_s=(1.0,),
    step_time_s=1.0,
    tokens_per_s=8.0,
    losses=(0.7, 0.6),
    counted=TensorBytes(weights=10, gradients=10, optimizer_states=20, activations=5),
    num_trained_parameters=10,
    num_threads=1,
)


def _read(text: str) -> Ladder:
    return TypeAdapter(Ladder).validate_json(text)


def _measured(ladder: Ladder) -> list[TrialMeasurement]:
    return [rung.measured for rung in ladder.rungs if rung.measured is not None]


def test_dry_run_prints_the_rungs_and_what_each_changes(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    line = "bench ladder --dry-run --cpu --batch-size 4 --rungs baseline,micro-batch-2,length-16"
    finished = run_zerofit(*line.split(), cwd=tmp_path)
    assert finished.stdout == (
        "all-minilm-l6-v2 (BertForSequenceClassification, 22.7 M parameters), batch 4, length 128\n"
        "on CPU, 2 timed steps per rung\n"
        "  baseline: changes nothing\n"
        "  + micro-batches of 2: micro_batch_size 4 -> 2, gradient_accumulation_steps 1 -> 2\n"
        "  + length 16: sequence_length 128 -> 16\n"
    )
    assert finished.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_rung_runs_and_one_that_cannot_is_left_out(zerofit_fork: RunZerofit, folder: Path) -> None:
    line = "bench ladder --json --rungs tf32,adafactor --steps 1 --output out"
    finished = zerofit_fork(*line.split(), *_SIZES, cwd=folder)
    assert finished.returncode == 0, finished.stderr
    whole = _read(finished.stdout)
    tf32, adafactor = whole.rungs
    assert tf32.outcome.state is TrialState.CANNOT_RUN
    assert adafactor.strategy.tf32 is None
    assert (folder / "out" / "ladder.json").read_text() == finished.stdout
    (measured,) = _measured(whole)
    assert measured.losses[-1] < measured.losses[0]
    assert adafactor.predicted is not None
    counted, parts = measured.counted, adafactor.predicted.parts
    assert counted.gradients == parts.gradients > 0
    assert counted.weights == pytest.approx(parts.weights, rel=0.02)
    assert counted.optimizer_states == pytest.approx(parts.optimizer_states, rel=0.1)


def test_ctrl_c_ends_the_rung_and_prints_the_results_so_far(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "zerofit", "bench", "ladder", "--cpu", "--rungs", "baseline,bf16"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "rung 1 of 2, baseline ..." in process.stderr.readline()
    while not (children := psutil.Process(process.pid).children()):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert [line for line in output.splitlines() if "interrupted" in line] == [
        "baseline: not run: interrupted",
        "+ bf16: not run: interrupted",
    ]
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_a_ladder_is_not_overwritten(run_zerofit: RunZerofit, folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "ladder.json").write_text("{}")
    finished = run_zerofit("bench", "ladder", "--cpu", "--output", "out", cwd=folder)
    assert finished.stderr == (
        "error[file-exists]: the file exists and differs\n"
        "  found: out/ladder.json\n"
        "  why:   it may contain your work\n"
        "  fix:   write elsewhere with --output FOLDER, or overwrite with --force\n"
    )
    assert finished.returncode == 2


def test_a_plot_is_not_overwritten(run_zerofit: RunZerofit, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    (folder / "ladder.png").write_bytes(b"mine")
    finished = run_zerofit("bench", "ladder", *_SIZES, "--plot", "ladder.png", "--dry-run", cwd=folder)
    assert finished.stderr.startswith("error[file-exists]: the file exists and differs\n")
    assert (finished.returncode, finished.stdout) == (2, "")


@pytest.mark.parametrize(
    ("said", "rule", "found"),
    [
        (("--rungs", "baseline,length-65"), "sequence-too-long", "--rungs with length-65 and the model tiny"),
        (("--gpus", "2x4090"), "ladder-on-one-gpu", "--gpus 2x4090"),
    ],
)
def test_settings_that_no_rung_supports_are_refused(
    folder: Path, said: tuple[str, ...], rule: str, found: str
) -> None:
    arguments = ["--model", str(folder / "tiny"), "--seq-len", "8", "--cpu", "--dry-run", *said]
    with pytest.raises(UserError) as raised:
        ladder.main(arguments, standalone_mode=False)
    assert (raised.value.rule, raised.value.found.replace(str(folder / "tiny"), "tiny")) == (rule, found)


def test_ctrl_c_while_predicting_keeps_what_was_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    done = TrialOutcome(state=TrialState.DONE, measured=_MEASURED)
    monkeypatch.setattr(Predictor, "predict", interrupted)
    monkeypatch.setattr(measured_ladder, "run_trial", lambda *_, **__: done)
    arguments = [
        "--model",
        str(folder / "tiny"),
        "--seq-len",
        "8",
        "--cpu",
        "--rungs",
        "baseline,sgd",
        "--json",
    ]
    assert ladder.main(arguments, standalone_mode=False) == 130
    result = _read(capsys.readouterr().out)
    assert _measured(result) == [_MEASURED, _MEASURED]


def test_the_table_is_printed_even_if_the_plot_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = folder / "late" / "ladder.png"

    def run(*_: object, **__: object) -> TrialOutcome:
        picture.parent.write_text("in the way by now")
        return TrialOutcome(state=TrialState.DONE, measured=_MEASURED)

    monkeypatch.setattr(Predictor, "predict", lambda *_, **__: None)
    monkeypatch.setattr(measured_ladder, "run_trial", run)
    arguments = ["--model", str(folder / "tiny"), "--seq-len", "8", "--cpu", "--rungs", "sgd"]
    with pytest.raises(UserError, match="not-writable"):
        ladder.main([*arguments, "--plot", str(picture)], standalone_mode=False)
    assert "+ SGD" in capsys.readouterr().out


@pytest.mark.evidence
@pytest.mark.timeout(3600)
def test_every_rung_of_the_default_ladder_does_its_work(zerofit_process: RunZerofit, tmp_path: Path) -> None:
    line = "bench ladder --cpu --json --attention eager"
    finished = zerofit_process(*line.split(), cwd=tmp_path, timeout_s=3500)
    whole = _read(finished.stdout)
    assert [rung.name for rung in whole.rungs] == DEFAULT_RUNGS.split(",")
    base, accumulated, checkpointed, adafactor, frozen, short = _measured(whole)
    activations = [measured.counted.activations or 0 for measured in _measured(whole)]
    assert accumulated.process_bytes < base.process_bytes / 2
    assert activations[1] < activations[0] / 30
    assert activations[2] < activations[1] / 4
    assert adafactor.counted.optimizer_states < checkpointed.counted.optimizer_states / 50
    assert adafactor.process_bytes < 0.8 * checkpointed.process_bytes
    assert frozen.counted.gradients < adafactor.counted.gradients * 0.6
    assert short.step_time_s < frozen.step_time_s
    assert short.process_bytes <= 1.05 * frozen.process_bytes
    assert accumulated.losses == pytest.approx(base.losses, rel=1e-3)
    assert checkpointed.losses == pytest.approx(accumulated.losses, rel=1e-5)
