"""Examples of the rules of zerofit/checking/rules/launch/flags.py."""

from __future__ import annotations

from typing import Any

from rule_examples.example import LAUNCH, NAMING_LAUNCH, ZERO2_LAUNCH, Example, Examples, config


def _launched(flags: str, file: dict[str, Any] = ZERO2_LAUNCH) -> Example:
    return Example(accelerate=file, command=f"{LAUNCH} {flags}")


EXAMPLES = {
    "launch-unknown-flag": Examples(
        bad=_launched("--zero_stag 3"),
        good=_launched("--zero_stage 3"),
    ),
    "launch-flag-without-value": Examples(
        bad=_launched("--mixed_precision --zero_stage 2"),
        good=_launched("--mixed_precision no --zero_stage 2"),
    ),
    "launch-flag-value": Examples(
        bad=_launched("--mixed_precision bf61"),
        good=_launched("--mixed_precision bf16"),
    ),
    "launch-without-script": Examples(
        bad=Example(command="accelerate launch --num_processes 2 --main_process_ip train.py"),
        good=Example(command="accelerate launch --num_processes 2 --main_process_ip localhost train.py"),
    ),
    "launch-flags-exclude-each-other": Examples(
        bad=Example(command="accelerate launch --num_processes 1 --use_deepspeed --multi_gpu"),
        good=Example(command="accelerate launch --num_processes 1 --use_deepspeed"),
    ),
    "launch-flags-ignored-beside-deepspeed-file": Examples(
        bad=Example(deepspeed=config(2), accelerate=NAMING_LAUNCH, command=f"{LAUNCH} --zero_stage 3"),
        good=Example(deepspeed=config(3), accelerate=NAMING_LAUNCH, command=LAUNCH),
    ),
    "launch-flags-without-deepspeed": Examples(
        bad=_launched("--zero_stage 3", {**ZERO2_LAUNCH, "distributed_type": "NO", "deepspeed_config": {}}),
        good=_launched("--zero_stage 3"),
    ),
    "cpu-flag-skips-deepspeed": Examples(
        bad=_launched("--cpu"),
        good=Example(accelerate=ZERO2_LAUNCH, command=LAUNCH),
    ),
}
