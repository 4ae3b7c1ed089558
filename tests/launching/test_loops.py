"""Loops of their own kind: the step left to accelerate, plugins, batches that do not fit the plan."""

from __future__ import annotations

import pytest
import torch
from runs import SCRIPTS, Launch

DEEPSPEED = ("--num-processes", "1", "--preset", "z2")


def _numbers_of_plain_torch() -> list[float]:
    """Return what leaves_the_step.py prints, with every step taken."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    inputs = torch.randn(8, 2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    numbers = []
    for batch in inputs:
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        numbers.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((model(batch) - batch.sum(1, keepdim=True)).square().mean().item())
        scheduler.step()
        numbers.append(scheduler.get_last_lr()[0])
    return [*numbers, *[sum(weight.abs().sum().item() for weight in model.parameters())] * 2]


@pytest.mark.slow
def test_a_script_that_leaves_the_step_to_accelerate_gets_it_in_backward(launch: Launch) -> None:
    run = launch(*DEEPSPEED, str(SCRIPTS / "leaves_the_step.py")).check()
    lines = [line.split() for line in run.stdout.splitlines()]
    numbers = [float(words[1]) for words in lines if words[0] == "number"]
    assert numbers == pytest.approx(_numbers_of_plain_torch(), rel=1e-5)


@pytest.mark.slow
def test_the_plan_wins_over_the_scripts_own_plugins(launch: Launch) -> None:
    flags = ("--gradient-accumulation-steps", "2", "--gradient-clipping", "0.3")
    run = launch(*DEEPSPEED, *flags, str(SCRIPTS / "own_plugins.py")).check()
    assert "stage 2 2\nsteps 2\n" in run.stdout
    assert (
        "zerofit: DeepSpeed is configured as the plan says; the script brings a DeepSpeedPlugin\n"
        in run.stderr
    )
    assert "zerofit: gradient accumulation is 2 steps; the script says 4, and if it counts" in run.stderr


@pytest.mark.slow
def test_a_global_batch_that_the_script_would_not_make_is_refused(launch: Launch) -> None:
    flags = ("--num-processes", "1", "--micro-batch-size", "2", "--global-batch-size", "8")
    run = launch(*flags, str(SCRIPTS / "shards.py"), "accelerate")
    assert run.exit_code == 2
    assert (
        "error[global-batch-differs]: the script does not have the requested global batch size\n"
        "  found: global batch 8, and 4 samples on each of 1 rank in the script, which makes 4\n"
    ) in run.stderr
    assert "Traceback" not in run.stderr
