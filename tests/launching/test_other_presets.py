"""The presets that do not train on plain CPU ranks: inference, and offload to NVMe."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from example_runs import (
    GLOBAL_BATCH_SIZE,
    accelerate_example,
    accelerate_losses,
    trainer_example,
    trainer_losses,
)
from runs import SCRIPTS, Run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("route", ["accelerate", pytest.param("trainer", marks=pytest.mark.evidence)])
def test_zero3_inference_gives_the_loss_of_one_process(route: str, launch: Callable[..., Run]) -> None:
    script = str(SCRIPTS / "infer.py")
    one = launch("--num-processes", "1", script, route, "one.json").check()
    launch("--num-processes", "2", "--preset", "z3-inference", script, route, "two.json").check()
    expected, loss = (json.loads((one.folder / name).read_text()) for name in ("one.json", "two.json"))
    assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.nvme
@pytest.mark.parametrize("route", ["accelerate", "trainer"])
def test_offload_to_a_folder_trains_on_two_ranks(
    route: str, launch: Callable[..., Run], data_dir: Path, tmp_path: Path
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
