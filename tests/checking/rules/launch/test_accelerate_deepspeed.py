"""DeepSpeed in accelerate's file: what it refuses, and what it loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Finding
from zerofit.configs.document import Edit, RemoveKey, SetValue

Check = Callable[..., list[Finding]]

_NAME = "accelerate.yaml"
_FILE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 2}
_ZERO2 = {"zero_optimization": {"stage": 2}}


def _named(keys: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {**_FILE, **top, "deepspeed_config": {"deepspeed_config_file": "ds_config.json", **keys}}


def test_a_key_beside_the_file_is_said_whole(check_example: Check) -> None:
    (finding,) = check_example(
        "accelerate-keys-beside-deepspeed-file", accelerate=_named({"zero_stage": 3}), deepspeed=_ZERO2
    )
    assert finding.as_text() == (
        "error[accelerate-keys-beside-deepspeed-file]: accelerate refuses these keys beside "
        "deepspeed_config_file\n"
        "  found: deepspeed_config.zero_stage=3 beside deepspeed_config.deepspeed_config_file=ds_config.json"
        "   (accelerate.yaml:6)\n"
        "  why:   a DeepSpeed file has the last word on them, and accelerate takes a second source for a "
        "mistake\n"
        "  fix:   take the key out, and write zero_optimization.stage in the DeepSpeed file\n"
        "  see:   https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py"
    )
    assert finding.edits == ()  # 2 or 3: nobody but the user knows


_OUT = RemoveKey(document=_NAME, path=("deepspeed_config", "zero_stage"))
_MOVED: list[tuple[dict[str, Any], dict[str, Any], tuple[Edit, ...]]] = [
    ({"zero_stage": 2}, {}, (_OUT,)),
    (
        {"gradient_accumulation_steps": 4},
        {},
        (
            SetValue(document="ds_config.json", path=("gradient_accumulation_steps",), value=4),
            RemoveKey(document=_NAME, path=("deepspeed_config", "gradient_accumulation_steps")),
        ),
    ),
    ({"gradient_clipping": 0.5}, {"gradient_clipping": "auto"}, ()),
    (
        {"offload_param_device": "none"},
        {},
        (RemoveKey(document=_NAME, path=("deepspeed_config", "offload_param_device")),),
    ),
    ({"offload_param_device": "cpu"}, {}, ()),
]


@pytest.mark.parametrize(("keys", "deepspeed", "edits"), _MOVED)
def test_a_key_moves_where_nothing_is_lost(
    check_example: Check, keys: dict[str, Any], deepspeed: dict[str, Any], edits: tuple[Edit, ...]
) -> None:
    (finding,) = check_example(
        "accelerate-keys-beside-deepspeed-file", accelerate=_named(keys), deepspeed={**_ZERO2, **deepspeed}
    )
    assert finding.edits == edits


_PRECISIONS: list[tuple[Any, dict[str, Any], str, int | None]] = [
    ("no", {}, "", 1),
    ("no", {"bf16": {"enabled": True}}, "", 0),
    ("bf16", {}, "", 0),
    (False, {}, "", 0),  # the type is mended first
    (None, {}, "", None),
    ("bf16", {}, " --mixed_precision bf16", None),  # the flag takes the key's place
]


@pytest.mark.parametrize(("value", "deepspeed", "flag", "num_edits"), _PRECISIONS)
def test_mixed_precision_beside_the_file(
    check_example: Check, value: Any, deepspeed: dict[str, Any], flag: str, num_edits: int | None
) -> None:
    findings = check_example(
        "accelerate-keys-beside-deepspeed-file",
        accelerate=_named({}, mixed_precision=value),
        deepspeed={**_ZERO2, **deepspeed},
        command=f"accelerate launch --config_file accelerate.yaml{flag}",
    )
    assert [len(finding.edits) for finding in findings] == ([] if num_edits is None else [num_edits])


_QUIET: list[tuple[str, dict[str, Any]]] = [
    ("accelerate-keys-beside-deepspeed-file", _named({"zero3_init_flag": True})),
    ("accelerate-keys-beside-deepspeed-file", _named({"deepspeed_multinode_launcher": "standard"})),
    ("deepspeed-section-without-deepspeed", {**_FILE, "distributed_type": "FSDP", "deepspeed_config": {}}),
    ("deepspeed-section-without-deepspeed", {**_FILE, "distributed_type": "deepspeed"}),
    ("use-cpu-with-deepspeed", {**_FILE, "distributed_type": "MULTI_CPU", "use_cpu": True}),
    ("accelerate-loses-nvme-path", {**_FILE, "deepspeed_config": {"offload_optimizer_device": "cpu"}}),
    ("accelerate-loses-zero-clipping", {**_FILE, "deepspeed_config": {"gradient_clipping": 0.5}}),
    ("accelerate-loses-zero-clipping", {**_FILE, "deepspeed_config": {"gradient_clipping": "auto"}}),
]


@pytest.mark.parametrize(("rule", "accelerate"), _QUIET)
def test_what_works_is_left_alone(check_example: Check, rule: str, accelerate: dict[str, Any]) -> None:
    assert check_example(rule, accelerate=accelerate) == []


def test_a_folder_given_by_flag_is_lost_too(check_example: Check) -> None:
    command = "accelerate launch --use_deepspeed --zero_stage 3 --offload_param_device nvme"
    (finding,) = check_example(
        "accelerate-loses-nvme-path", command=f"{command} --offload_param_nvme_path /nvme"
    )
    assert finding.found == "--offload_param_device nvme with --offload_param_nvme_path /nvme"


_DYNAMO: list[tuple[dict[str, Any], str, list[str]]] = [
    (
        {"dynamo_config": {"backend": "inductor"}},
        "",
        ["dynamo_config.backend=inductor with distributed_type=DEEPSPEED"],
    ),
    ({"dynamo_backend": "EAGER"}, "", ["dynamo_backend=EAGER with distributed_type=DEEPSPEED"]),
    ({}, " --dynamo_backend eager", ["--dynamo_backend eager with distributed_type=DEEPSPEED"]),
    ({"dynamo_backend": "EAGER"}, " --dynamo_backend no", []),
    ({"dynamo_backend": "NO"}, "", []),
    ({"dynamo_config": {}}, "", []),
    ({"dynamo_backend": "EAGER", "distributed_type": "MULTI_GPU"}, "", []),
]


@pytest.mark.parametrize(("top", "flag", "found"), _DYNAMO)
def test_dynamo_settings_are_lost(
    check_example: Check, top: dict[str, Any], flag: str, found: list[str]
) -> None:
    findings = check_example(
        "dynamo-ignored-with-deepspeed",
        accelerate={**_FILE, **top},
        command=f"accelerate launch --config_file accelerate.yaml{flag}",
    )
    assert [finding.found for finding in findings] == found
