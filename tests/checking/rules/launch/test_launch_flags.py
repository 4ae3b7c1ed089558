"""Flags of accelerate launch: refused, ignored, or in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Finding

Check = Callable[..., list[Finding]]

_FILE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 2}
_NAMED = {**_FILE, "deepspeed_config": {"deepspeed_config_file": "ds_config.json"}}
_LAUNCH = "accelerate launch --config_file accelerate.yaml"

_ITS_OWN = "take the flag out, or write it behind the script where it is the script's"


def test_an_ignored_flag_is_said_whole(check_example: Check) -> None:
    (finding,) = check_example(
        "launch-flags-ignored-beside-deepspeed-file",
        accelerate=_NAMED,
        deepspeed={"zero_optimization": {"stage": 2}},
        command=f"{_LAUNCH} --zero-stage=3",
    )
    assert finding.as_text() == (
        "warning[launch-flags-ignored-beside-deepspeed-file]: accelerate ignores these flags beside a "
        "DeepSpeed file\n"
        "  found: --zero-stage=3 with zero_optimization.stage=2 in ds_config.json\n"
        '  why:   a flag fills in what is "auto" in the file, and nothing else; nobody says that it lost\n'
        "  fix:   write zero_optimization.stage: 3 in ds_config.json, without the flag\n"
        "  see:   https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py"
    )


_BESIDE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("--gradient_clipping 0.3", {}, ["--gradient_clipping 0.3 with no gradient_clipping in ds_config.json"]),
    ("--gradient_clipping 0.3", {"gradient_clipping": "auto"}, []),
    ("--gradient_clipping 0.3", {"gradient_clipping": 0.3}, []),
    (
        "--gradient_accumulation_steps 4",
        {"gradient_accumulation_steps": 1},
        ["--gradient_accumulation_steps 4 with gradient_accumulation_steps=1 in ds_config.json"],
    ),
    ("--gradient_accumulation_steps $STEPS", {}, []),
    ("--offload_optimizer_device none", {}, []),
    ("--zero3_save_16bit_model true", {}, []),  # there is nothing to gather below stage 3
    ("--zero3_init_flag true --mixed_precision bf16", {}, []),
]


@pytest.mark.parametrize(("flags", "deepspeed", "found"), _BESIDE)
def test_flags_beside_a_deepspeed_file(
    check_example: Check, flags: str, deepspeed: dict[str, Any], found: list[str]
) -> None:
    findings = check_example(
        "launch-flags-ignored-beside-deepspeed-file",
        accelerate=_NAMED,
        deepspeed={"zero_optimization": {"stage": 2}, **deepspeed},
        command=f"{_LAUNCH} {flags}",
    )
    assert [finding.found for finding in findings] == found


_FLAGS = [
    ("launch-unknown-flag", "--main_port=29500", [("--main_port=29500", "write --main_process_port")]),
    ("launch-unknown-flag", "--num-processes 2 --tee 3 -m", []),
    ("launch-unknown-flag", "$FLAGS", []),
    (
        "launch-flag-value",
        "--num_processes two",
        [("--num_processes two", "give --num_processes a whole number")],
    ),
    (
        "launch-flag-value",
        "--main_process_port 99999",
        [
            (
                "--main_process_port 99999",
                "give --main_process_port a whole number of at least 0 and of at most 65535",
            )
        ],
    ),
    ("launch-flag-value", "--num_processes $N --mixed_precision ${P}", []),
    ("launch-flag-value", "--num_processes 2 --monitor_interval 0.5 --gpu_ids 0,1", []),
    (
        "launch-flags-exclude-each-other",
        "--cpu --use_deepspeed",
        [("--cpu with --use_deepspeed", "keep one: --use_deepspeed brings several GPUs with it")],
    ),
    ("launch-flags-exclude-each-other", "--use_deepspeed --use_deepspeed", []),
]


@pytest.mark.parametrize(("rule", "flags", "found"), _FLAGS)
def test_flags_by_themselves(
    check_example: Check, rule: str, flags: str, found: list[tuple[str, str]]
) -> None:
    findings = check_example(rule, command=f"accelerate launch {flags}")
    assert [(finding.found, finding.fix) for finding in findings] == found


_UNKNOWN: list[tuple[str, list[tuple[str, str]]]] = [
    ("torchrun --nproc_pre_node 8 x.py", [("--nproc_pre_node 8", "write --nproc_per_node")]),
    ("torchrun --nproc-per 8 --rdzv-id=1 -m x", []),
    ("torchrun --zero_stage 3 x.py", [("--zero_stage 3", _ITS_OWN)]),
    ("torchrun --$MORE --nproc_per_node $N x.py", []),
    ("python -m torch.distributed.launch --use_env x.py", []),
    ("deepspeed --num_gpsu 2 x.py", [("--num_gpsu 2", "write --num_gpus")]),
    ("deepspeed --num-gpus=2 x.py", [("--num-gpus=2", "write --num_gpus")]),
    ("deepspeed -H/job/hostfile --num_accelerators 2 --bind_cores x.py --num-gpus 2", []),
]


@pytest.mark.parametrize(("command", "found"), _UNKNOWN)
def test_flags_of_other_launchers(check_example: Check, command: str, found: list[tuple[str, str]]) -> None:
    findings = check_example("launch-unknown-flag", command=command)
    assert [(finding.found, finding.fix) for finding in findings] == found


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("accelerate launch --zero_stage 3", ["warning: --zero_stage 3 with no --use_deepspeed"]),
        (
            "accelerate launch --multi_gpu --zero_stage 3 --gradient_clipping 1.0",
            ["error: --zero_stage 3 --gradient_clipping 1.0 with --multi_gpu"],
        ),
        ("accelerate launch --use_deepspeed --zero_stage 3", []),
        ("accelerate launch --num_processes 2", []),
        ("torchrun --zero_stage 3", []),
    ],
)
def test_flags_without_deepspeed(check_example: Check, command: str, said: list[str]) -> None:
    findings = check_example("launch-flags-without-deepspeed", command=command)
    assert [f"{finding.severity}: {finding.found}" for finding in findings] == said
