"""zerofit.launch for scripts and notebooks: a real run, and what a dry run says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zerofit


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("import sys\nprint('trained', *sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n")
    return path


@pytest.mark.slow
def test_a_run_returns_how_it_ended(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = zerofit.launch("train.py", "3", on_cpu=True, captures=False)
    assert (run.exit_code, run.cause) == (3, "rank 0 exited with 3")
    assert capfd.readouterr().out == "trained 3\n"
    document = json.loads((run.folder / "run.json").read_text())
    assert (document["exit_code"], document["command"]) == (3, run.command)
    assert {path.name for path in run.files} == {"plan.json", "accelerate.yaml", "command.sh"}
    assert all(path.read_text() == text for path, text in run.files.items())


def test_a_dry_run_starts_nothing(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = zerofit.launch(
        "train.py", "0", on_cpu=True, captures=False, num_processes=2, zero_stage=2, dry_run=True
    )
    assert (run.exit_code, run.plan.topology.world_size) == (None, 2)
    assert "--num_processes 2" in run.command
    assert {path.name for path in run.files} >= {"ds_config.json", "plan.json"}
    assert not run.folder.exists()
    assert capfd.readouterr() == ("", "")


def test_a_plan_file_is_followed(script: Path, tmp_path: Path) -> None:
    first = zerofit.launch("train.py", "0", on_cpu=True, captures=False, gradient_clipping=0.5, dry_run=True)
    (tmp_path / "plan.json").write_text(
        next(text for path, text in first.files.items() if path.name == "plan.json")
    )
    for plan in (first.plan, "plan.json"):
        run = zerofit.launch("train.py", "0", plan=plan, captures=False, dry_run=True)
        assert run.plan.strategy == first.plan.strategy


def test_a_missing_script_is_named(script: Path) -> None:
    with pytest.raises(zerofit.UserError) as error:
        zerofit.launch("trian.py")
    assert error.value.fix == "did you mean train.py?"
