"""What the strategy line says is the engine that trains, whatever engine the script brings."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from runs import run_command

if TYPE_CHECKING:
    from pathlib import Path

_LOOP = """\
import torch
from accelerate import Accelerator, {plugin}
accelerator = Accelerator({argument})
print("trains on", accelerator.distributed_type)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(2):
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
"""
_DEEPSPEED = {"plugin": "DeepSpeedPlugin", "argument": "deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)"}
_SEVERAL = {"plugin": "DeepSpeedPlugin", "argument": "deepspeed_plugins={'a': DeepSpeedPlugin(zero_stage=3)}"}
_NATIVE = ("--engine", "native")


@pytest.mark.parametrize(
    ("own", "flags", "trains_on"),
    [
        pytest.param(
            _DEEPSPEED, (*_NATIVE, "--num-processes", "1"), "DistributedType.NO", marks=pytest.mark.slow
        ),
        (_SEVERAL, (*_NATIVE, "--num-processes", "1"), "DistributedType.NO"),
        pytest.param(
            _DEEPSPEED,
            (*_NATIVE, "--num-processes", "2"),
            "DistributedType.MULTI_CPU",
            marks=pytest.mark.slow,
        ),
        (_DEEPSPEED, ("--zero-stage", "1", "--num-processes", "1"), "DistributedType.DEEPSPEED"),
    ],
)
def test_a_plugin_of_the_script_does_not_choose(
    own: dict[str, str], flags: tuple[str, ...], trains_on: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(_LOOP.format(**own))
    run = run_command((sys.executable, "-m", "zerofit", "launch", "--cpu", *flags, "train.py"), tmp_path)
    assert f"trains on {trains_on}" in run.check().stdout
    assert "the script brings a DeepSpeedPlugin" in run.stderr


@pytest.mark.parametrize(
    "flags",
    [
        (*_NATIVE, "--num-processes", "1"),
        pytest.param(("--engine", "fsdp2", "--num-processes", "2"), marks=pytest.mark.slow),
    ],
)
def test_the_clipping_of_a_plugin_that_is_left_out_is_told(flags: tuple[str, ...], tmp_path: Path) -> None:
    argument = "deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.001)"
    (tmp_path / "train.py").write_text(_LOOP.format(plugin="DeepSpeedPlugin", argument=argument))
    launch = (sys.executable, "-m", "zerofit", "launch", "--cpu", *flags)
    told = "zerofit: gradients are not clipped at 0.001, as the DeepSpeedPlugin would: --gradient-clipping"
    assert told in run_command((*launch, "train.py"), tmp_path).check().stderr
    clips = run_command((*launch, "--gradient-clipping", "0.001", "train.py"), tmp_path).check()
    assert told not in clips.stderr
    assert "gradients are clipped to 0.001" in clips.stderr


def test_another_engine_of_the_script_is_refused(tmp_path: Path) -> None:
    text = _LOOP.format(plugin="PartialState", argument="").replace(
        "accelerator = Accelerator()", "Accelerator.distributed_type = 'FSDP'\naccelerator = Accelerator()"
    )
    (tmp_path / "train.py").write_text(text)
    flags = ("--cpu", *_NATIVE, "--num-processes", "1")
    run = run_command((sys.executable, "-m", "zerofit", "launch", *flags, "train.py"), tmp_path)
    assert run.exit_code == 2
    assert "error[engine-not-as-planned]" in run.stderr
    assert "is FSDP, and the plan says native" in run.stderr
