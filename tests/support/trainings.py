"""Runs a script plainly or by `zerofit launch`, with the recorder beside it, and reads what it did."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from records import Tolerance, Training, differences, read_training
from runs import run_command, stock_launcher

HERE = Path(__file__).parents[1] / "semantics"
_TRAINER = [
    *("--per_device_train_batch_size=4", "--gradient_accumulation_steps=2", "--per_device_eval_batch_size=4"),
    *("--num_train_epochs=2", "--learning_rate=2e-3", "--warmup_steps=2", "--eval_strategy=epoch"),
    *("--logging_steps=1", "--disable_tqdm=true", "--report_to=none", "--save_strategy=no"),
]
ARGUMENTS: dict[str, list[str]] = {
    "plain_loop": [],
    "accumulating_loop": [],
    "loop_by_hand": [],
    "two_optimizers": [],
    "late_loader": [],
    "streamed_loop": [],
    "trainer_classifier": _TRAINER,
    "trainer_seq2seq": _TRAINER,
    "trainer_lora": _TRAINER,
    "trainer_padding_free": _TRAINER,
    "trainer_own_parts": _TRAINER,
}
"""Each script with the arguments that it always gets; its own micro-batch is 4 samples, two_optimizers' 8."""

WHOLE = {
    (script, num_processes): (
        f"--per_device_train_batch_size={8 * num_processes}",
        "--gradient_accumulation_steps=1",
    )
    for script in ("trainer_classifier", "trainer_seq2seq")
    for num_processes in (1, 2)
}
"""By script and ranks: what makes it train whole batches in one process. BERT and T5 take num_items_in_batch
and ignore it: Trainer by itself makes loss and gradients too large by accumulation steps times ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Files and numbers that one run of a script left."""

    training: Training
    result: dict[str, Any]
    """The script's own counters, losses and evaluations."""
    stderr: str


def run_plainly(script: str, folder: Path, *arguments: str, num_processes: int) -> Ended:
    """Run a script by the stock `accelerate launch` on CPU ranks."""
    # `--cpu` would start one process alone; the ranks see in the environment that they are on the CPU.
    ranks = "--multi_gpu" if num_processes > 1 else "--cpu"
    flags = (
        f"{ranks} --num_processes={num_processes} --num_machines=1 --mixed_precision=no --dynamo_backend=no"
    )
    # transformers takes NCCL for several ranks, whatever the device, unless it is told.
    gloo = ("--ddp_backend", "gloo") if num_processes > 1 and script.startswith("trainer") else ()
    launcher = (*stock_launcher(), *flags.split())
    return _run(launcher, script, folder, (*arguments, *gloo), ACCELERATE_USE_CPU="true", RECORD_ENDS="1")


def run_by_stock_deepspeed(script: str, folder: Path, *arguments: str) -> Ended:
    """Run a script under ZeRO-2 by the stock `accelerate launch`, which has one process alone on the CPU."""
    flags = "--num_processes=1 --num_machines=1 --mixed_precision=no --dynamo_backend=no --use_deepspeed"
    config = f"--deepspeed_config_file={HERE.parents[1] / 'ds_configs' / 'ds_z2.json'}"
    launcher = (*stock_launcher(), *flags.split(), config)
    return _run(launcher, script, folder, arguments, DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")


def run_by_zerofit(script: str, folder: Path, *arguments: str, flags: tuple[str, ...]) -> Ended:
    """Run a script by `zerofit launch` with these flags."""
    return _run((sys.executable, "-m", "zerofit", "launch", "--cpu", *flags), script, folder, arguments)


def _run(
    launcher: tuple[str, ...], script: str, folder: Path, arguments: tuple[str, ...], **more: str
) -> Ended:
    folder.mkdir(parents=True, exist_ok=True)
    output = "--output_dir" if script.startswith("trainer") else "--output-dir"
    done = run_command(
        (*launcher, str(HERE / "scripts" / f"{script}.py"), output, "out", *ARGUMENTS[script], *arguments),
        folder,
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="PASSIVE",
        PYTHONPATH=str(HERE / "recorder"),
        RECORD_TRAINING=str(folder / "record"),
        **more,
    ).check()
    result = json.loads((folder / "out" / "result.json").read_text())
    return Ended(training=read_training(folder / "record"), result=result, stderr=done.stderr)


def assert_same(seen: Ended, expected: Ended, *, tolerance: Tolerance | None = None) -> None:
    """The run did step by step what was expected, and its script saw the same numbers."""
    found = differences(expected.training, seen.training, tolerance)
    assert not found, "\n".join((*found, seen.stderr))
    for name, value in expected.result.items():
        if name == "evaluations" and expected.training.world_size != seen.training.world_size:
            continue  # their batches are other ones, and so are the means over them
        assert_close(seen.result[name], value, name)


def assert_close(seen: Any, expected: Any, name: str) -> None:
    """Counters are equal; losses and evaluations are within fp32's rounding."""
    if isinstance(expected, int):
        assert seen == expected, name
        return
    assert len(seen) == len(expected), name
    for number, (one, other) in enumerate(zip(seen, expected, strict=True)):
        # Trainer rounds the losses that it logs to four digits behind the point.
        assert abs(one - other) <= max(1e-4, 1e-4 * abs(other)), f"{name}[{number}]: {one}, not {other}"
