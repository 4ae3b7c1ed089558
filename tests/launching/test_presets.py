"""Presets for inference and NVMe under zerofit, and the files of ds_configs/ under stock accelerate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_runs import (
    GLOBAL_BATCH_SIZE,
    accelerate_example,
    accelerate_losses,
    trainer_example,
    trainer_losses,
)
from runs import ROOT, SCRIPTS, Launch, run_command, stock_launcher

from zerofit.core.presets import PRESETS
from zerofit.core.strategy import OffloadDevice

pytestmark = pytest.mark.slow

FILES = [
    str(ROOT / "ds_configs" / preset.deepspeed_file)
    for preset in PRESETS
    if preset.deepspeed_file is not None
    and preset.trains
    and preset.strategy.optimizer_offload is not OffloadDevice.NVME
]


@pytest.mark.parametrize("route", ["accelerate", pytest.param("trainer", marks=pytest.mark.evidence)])
def test_zero3_inference_gives_the_loss_of_one_process(route: str, launch: Launch) -> None:
    script = str(SCRIPTS / "infer.py")
    one = launch("--num-processes", "1", script, route, "one.json").check()
    launch("--num-processes", "2", "--preset", "z3-inference", script, route, "two.json").check()
    expected, loss = (json.loads((one.folder / name).read_text()) for name in ("one.json", "two.json"))
    assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.nvme
@pytest.mark.parametrize("route", ["accelerate", "trainer"])
def test_offload_to_a_folder_trains_on_two_ranks(
    route: str, launch: Launch, data_dir: Path, tmp_path: Path
) -> None:
    example, losses = {
        "accelerate": (accelerate_example, accelerate_losses),
        "trainer": (trainer_example, trainer_losses),
    }[route]
    target = example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // 2)
    (tmp_path / "nvme").mkdir()
    flags = ("--num-processes", "2", "--preset", "z3-nvme", "--nvme-path", str(tmp_path / "nvme"))
    run = launch(*flags, *target).check()
    values = [loss for _, loss, _ in losses(run.folder)]
    assert values[-1] < values[0]


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
    command = [*stock_launcher(), *flags, str(SCRIPTS / "stock_presets.py")]
    run = run_command([*command, route, *FILES], tmp_path, DS_ACCELERATOR="cpu")
    assert run.exit_code == 0, run.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == len(FILES) == 6
    for name, values in losses.items():
        assert values == pytest.approx(losses["ds_z1"], rel=1e-5), name
    assert losses["ds_z1"][2] < losses["ds_z1"][0]
