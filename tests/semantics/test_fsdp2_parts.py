"""Under FSDP2 the scripts that DeepSpeed's one engine can't take train as alone, or are refused by name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from edited_runs import outcome_of
from runs import ROOT, Run, run_command, stock_launcher

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = str(ROOT / "tests" / "semantics" / "scripts" / "several_parts.py")
_WAY = 2e-5
"""Of the way that training took the weights, in fp32."""
_FSDP2 = ("--num-processes", "2", "--engine", "fsdp2", "--mixed-precision", "no")


@pytest.mark.parametrize(
    ("case", "refused"),
    [
        ("two-optimizers", ""),
        pytest.param("adversaries", "", marks=pytest.mark.slow),
        pytest.param("unprepared-optimizer", "", marks=pytest.mark.slow),
        pytest.param("loss-with-weights", "", marks=pytest.mark.slow),
        ("loss-in-the-optimizer", "optimizer-of-several-models-under-fsdp2"),
        ("teacher", ""),
    ],
)
def test_a_script_of_several_parts_trains_as_alone_or_is_refused(
    case: str, refused: str, tmp_path: Path
) -> None:
    alone, under = tmp_path / "alone", tmp_path / "under"
    alone.mkdir()
    flags = "--cpu --num_processes=1 --num_machines=1 --mixed_precision=no --dynamo_backend=no"
    stock = (*stock_launcher(), *flags.split(), _SCRIPT, "--case", case)
    run_command(stock, alone, ACCELERATE_USE_CPU="true").check()
    seen = outcome_of(_under_fsdp2(case, under), alone / "out")
    assert seen.refused == refused
    assert seen.distance <= _WAY


def _under_fsdp2(case: str, folder: Path) -> Run:
    folder.mkdir(exist_ok=True)
    launch = (sys.executable, "-m", "zerofit", "launch", "--cpu", *_FSDP2, _SCRIPT, "--case", case)
    return run_command(launch, folder)


@pytest.mark.slow
def test_accelerate_itself_refuses_local_sgd_under_fsdp2(tmp_path: Path) -> None:
    run = _under_fsdp2("local-sgd", tmp_path)
    assert run.exit_code == 1
    assert "LocalSGD is supported only for CPUs and GPUs" in run.stderr
    assert not (tmp_path / "out" / "end.safetensors").exists()
