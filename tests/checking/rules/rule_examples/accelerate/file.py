"""Examples of the rules of zerofit/checking/rules/accelerate/file.py."""

from __future__ import annotations

from rule_examples.example import LAUNCH, LAUNCH_FILE, ZERO2_LAUNCH, Example, Examples, launching, without

_PRECISION = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 1
mixed_precision: {}
deepspeed_config:
  zero_stage: 2
"""
_TWICE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_processes: 2
deepspeed_config:
  zero_stage: 3
  zero_stage: 1
"""
_ALONE = {**LAUNCH_FILE, "distributed_type": "NO"}


EXAMPLES = {
    "accelerate-key-repeated": Examples(
        bad=Example(accelerate=_TWICE),
        good=Example(accelerate=_TWICE.replace("  zero_stage: 1\n", "")),
    ),
    "accelerate-unknown-key": Examples(
        bad=Example(accelerate={**ZERO2_LAUNCH, "num_proceses": 1}),
        good=launching(),
    ),
    "accelerate-ignored-key": Examples(
        bad=launching({"zero_stag": 3}),
        good=launching({"zero_stage": 3}),
    ),
    "accelerate-value-type": Examples(
        bad=Example(accelerate=_PRECISION.format("no")),
        good=Example(accelerate=_PRECISION.format('"no"')),
    ),
    "accelerate-value-choice": Examples(
        bad=launching(distributed_type="deepspeed"),
        good=launching(),
    ),
    "accelerate-needs-distributed-type": Examples(
        bad=Example(accelerate=without(ZERO2_LAUNCH, "distributed_type")),
        good=launching(),
    ),
    "accelerate-needs-num-processes": Examples(
        bad=Example(accelerate=without(ZERO2_LAUNCH, "num_processes"), command=LAUNCH),
        good=Example(accelerate=ZERO2_LAUNCH, command=LAUNCH),
    ),
    "distributed-type-starts-one-process": Examples(
        bad=Example(accelerate={**_ALONE, "num_processes": 2}),
        good=Example(accelerate=_ALONE),
    ),
    "accelerate-key-needs-flag": Examples(
        bad=Example(accelerate={**ZERO2_LAUNCH, "rdzv_backend": "c10d"}),
        good=Example(accelerate={**ZERO2_LAUNCH, "rdzv_backend": "static"}),
    ),
}
