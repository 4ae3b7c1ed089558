"""The launcher's number format and the DeepSpeed file's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Finding
from zerofit.core.command import Route

Check = Callable[..., list[Finding]]
_OFF = "mixed-precision-turned-off-in-file"
_AGAINST = "mixed-precision-against-file"


def test_a_format_turned_off_is_said_whole(check_example: Check) -> None:
    (finding,) = check_example(
        _OFF,
        route=Route.ACCELERATE,
        command="accelerate launch --use_deepspeed --mixed_precision bf16",
        deepspeed={"bf16": {"enabled": False}},
    )
    assert finding.as_text() == (
        "error[mixed-precision-turned-off-in-file]: the DeepSpeed file turns off the number format that was "
        "asked for\n"
        "  found: --mixed_precision bf16 with bf16.enabled=false   (ds_config.json:3)\n"
        "  why:   the DeepSpeed file has the last word, and the run trains in fp32 without a message\n"
        '  fix:   write "auto" or true for enabled in the DeepSpeed file\n'
        "  see:   https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py"
    )


_CASES: list[tuple[str, str, dict[str, Any], list[str]]] = [
    (_OFF, "bf16", {"bf16": {"enabled": "auto"}}, []),
    (_OFF, "bf16", {}, []),
    (_OFF, "no", {"bf16": {"enabled": False}}, []),
    (_OFF, "bf16", {"bf16": {"enabled": False}, "fp16": {"enabled": True}}, []),
    (
        _AGAINST,
        "bf16",
        {"bf16": {"enabled": False}, "fp16": {"enabled": True}},
        ["--mixed_precision bf16 with fp16.enabled=true"],
    ),
    (_AGAINST, "fp16", {"bf16": {"enabled": True}}, ["--mixed_precision fp16 with bf16.enabled=true"]),
    (_AGAINST, "bf16", {"fp16": {"enabled": "auto"}}, []),
]


@pytest.mark.parametrize(("rule", "precision", "deepspeed", "found"), _CASES)
def test_flag_and_file(
    check_example: Check, rule: str, precision: str, deepspeed: dict[str, Any], found: list[str]
) -> None:
    findings = check_example(
        rule,
        route=Route.ACCELERATE,
        command=f"accelerate launch --use_deepspeed --mixed_precision {precision}",
        deepspeed=deepspeed,
    )
    assert [finding.found for finding in findings] == found
