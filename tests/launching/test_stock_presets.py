"""The files of ds_configs/ train under the stock accelerate and Trainer, without zerofit in the process."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from runs import ROOT, SCRIPTS, run_command

from zerofit.core.presets import PRESETS
from zerofit.core.strategy import OffloadDevice

if TYPE_CHECKING:
    from pathlib import Path

FILES = [
    str(ROOT / "ds_configs" / preset.deepspeed_file)
    for preset in PRESETS
    if preset.trains and preset.strategy.optimizer_offload is not OffloadDevice.NVME
]


@pytest.mark.evidence
@pytest.mark.parametrize("route", ["accelerate", "trainer"])
def test_each_preset_trains_without_zerofit(route: str, tmp_path: Path) -> None:
    # One rank: of several on the CPU, stock accelerate takes each for rank 0 of 1.
    (tmp_path / "ds_configs").symlink_to(ROOT / "ds_configs")
    flags = (
        "--config_file",
        "ds_configs/accelerate_z1.yaml",
        "--num_processes",
        "1",
        "--mixed_precision",
        "no",
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags, str(SCRIPTS / "stock_presets.py")]
    run = run_command([*command, route, *FILES], tmp_path, DS_ACCELERATOR="cpu")
    assert run.exit_code == 0, run.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == len(FILES) == 6
    for name, values in losses.items():
        assert values == pytest.approx(losses["ds_z1"], rel=1e-5), name
    assert losses["ds_z1"][2] < losses["ds_z1"][0]
