"""Writes the counters and losses of a script of this folder."""

import json
from pathlib import Path


def write_result(folder, **result):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result))


def end_training(accelerator, folder, **result):
    if accelerator.is_main_process:
        write_result(folder, **result)
    accelerator.end_training()


def write_steps(trainer, **result):
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        write_result(Path(trainer.args.output_dir), steps=trainer.state.global_step, losses=losses, **result)
