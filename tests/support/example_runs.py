"""The two examples as the tests run them: small, and their losses step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import ROOT, Run, run_command, stock_launcher

NUM_STEPS = 8
GLOBAL_BATCH_SIZE = 8
FP32_TOLERANCE = 2e-5
"""Relative. Sums over two ranks are rounded in another order; eight AdamW steps carry that on."""
# A norm that accelerate's own default of 1.0 would not give, and that the gradients exceed at every step.
_ACCELERATE = (
    f"--max-train-steps={NUM_STEPS} --num-warmup-steps=2 --max-grad-norm=0.2 --max-train-files=12 "
    "--max-eval-samples=8 --vocab-size=512 --sequence-length=32 --hidden-size=64 --num-layers=2"
)
_TRAINER = (
    f"--max_steps={NUM_STEPS} --warmup_steps=2 --max_grad_norm=0.2 --max_train_files=12 --logging_steps=1 "
    "--max_eval_samples=8 --per_device_eval_batch_size=4 --vocab_size=512 --sequence_length=32 "
    "--hidden_size=64 --num_layers=2 --save_strategy=no --disable_tqdm=true"
)

Losses = list[tuple[int, float, float]]
"""(step, loss, learning rate) of each optimizer step."""
PlainLosses = Callable[..., Losses]
"""Losses of an example, by route and more arguments, under the stock launcher: the fixture plain_losses."""


def accelerate_example(data_dir: Path, *, micro_batch_size: int) -> list[str]:
    """Return the command of the accelerate example, writing to ./out."""
    script = str(ROOT / "examples" / "train_accelerate.py")
    sizes = [f"--per-device-train-batch-size={micro_batch_size}"]
    return [script, "--output-dir=out", f"--data-dir={data_dir}", *_ACCELERATE.split(), *sizes]


def trainer_example(data_dir: Path, *, micro_batch_size: int) -> list[str]:
    """Return the command of the Trainer example, writing to ./out."""
    script = str(ROOT / "examples" / "train_trainer.py")
    sizes = [f"--per_device_train_batch_size={micro_batch_size}"]
    return [script, "--output_dir=out", f"--data_dir={data_dir}", *_TRAINER.split(), *sizes]


def plain_accelerate_launch(target: list[str], folder: Path) -> Run:
    """Run the stock `accelerate launch` on one CPU process."""
    flags = "--num_processes=1 --num_machines=1 --mixed_precision=no --dynamo_backend=no --cpu"
    command = [*stock_launcher(), *flags.split(), *target]
    return run_command(command, folder).check()


def accelerate_losses(folder: Path) -> Losses:
    """Return the losses that the accelerate example wrote."""
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["lr"]) for line in lines if "loss" in line]


def trainer_losses(folder: Path) -> Losses:
    """Return the losses that the Trainer example logged."""
    state = json.loads((folder / "out" / "trainer_state.json").read_text())
    lines = [line for line in state["log_history"] if "loss" in line]
    return [(line["step"], line["loss"], line["learning_rate"]) for line in lines]


def saved_dtypes(model_dir: Path) -> set[str]:
    """Return the formats of the weights that a run saved: what its engine held, as nothing casts them."""
    from safetensors import safe_open

    with safe_open(model_dir / "model.safetensors", framework="pt") as weights:
        return {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118


def written_precision(run: Run) -> str:
    """Return the precision in the plan that a run was started with."""
    return json.loads((run.run_folder / "plan.json").read_text())["strategy"]["precision"]


def assert_same(losses: Losses, expected: Losses, *, tolerance: float) -> None:
    """Check steps, learning rates and losses; the tolerance of losses is relative."""
    assert [step for step, _, _ in losses] == list(range(1, NUM_STEPS + 1))
    assert [rate for _, _, rate in losses] == pytest.approx([rate for _, _, rate in expected], rel=1e-9)
    assert [loss for _, loss, _ in losses] == pytest.approx([loss for _, loss, _ in expected], rel=tolerance)
