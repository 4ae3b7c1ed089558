"""A Trainer's own optimizer, and a model that ignores num_items_in_batch: stock is wrong, zerofit right."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import ROOT, SCRIPTS, Launch, Run, run_command, stock_launcher

TOKENS = str(SCRIPTS / "token_trainer.py")
ONE_BIG_BATCH = [
    # loss, norm of the gradients, learning rate: `python token_trainer.py 8 1 own`
    (1.1072570, 0.8506784, 0.25),
    (1.1587932, 0.9950029, 0.25),
    (1.1635412, 0.8150706, 0.5),
]
FP32_TOLERANCE = 1e-5
"""Relative. Sums over ranks and micro-batches are rounded in another order."""


def steps(run: Run) -> list[tuple[float, ...]]:
    """Return loss, norm and learning rate of each step that the script printed."""
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("step ")]
    return [tuple(float(word) for word in words[1:]) for words in lines]


@pytest.mark.slow
def test_stock_deepspeed_drops_the_scripts_optimizer_and_makes_the_loss_too_large(tmp_path: Path) -> None:
    config = str(ROOT / "ds_configs" / "ds_z2.json")
    flags = f"--use_deepspeed --deepspeed_config_file={config} --num_processes=1 --num_machines=1"
    command = [*stock_launcher(), *flags.split(), "--mixed_precision=no"]
    on_cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    found = steps(run_command([*command, TOKENS, "4", "2", "own"], tmp_path, **on_cpu).check())
    assert [step[2] for step in found] == pytest.approx([0.1, 0.2 / 3, 0.1 / 3])  # of TrainingArguments
    assert found[0][:2] == pytest.approx([2 * number for number in ONE_BIG_BATCH[0][:2]], rel=0.01)


@pytest.mark.slow
def test_zerofit_trains_as_one_big_batch_on_two_ranks(launch: Launch) -> None:
    run = launch("--num-processes", "2", "--preset", "z2", TOKENS, "2", "2", "own").check()
    found = steps(run)
    assert len(found) == len(ONE_BIG_BATCH)
    for step, expected in zip(found, ONE_BIG_BATCH, strict=True):
        assert step == pytest.approx(expected, rel=FP32_TOLERANCE)
    assert (
        "zerofit: the script's SGD trains; under DeepSpeed Trainer would put sgd in its place\n" in run.stderr
    )
    assert (
        "zerofit: each batch's loss counts by its share of the step's labels: BertForTokenClassification "
        "takes num_items_in_batch and ignores it, and Trainer would make loss and gradients too large by "
        "accumulation steps times ranks\n"
    ) in run.stderr
