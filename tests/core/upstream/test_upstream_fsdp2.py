"""How accelerate's plugin for FSDP2 is changed for a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from zerofit.core.upstream.fsdp2 import keep_output_formats

_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("policy", "returned_in"),
    [
        ({"param_dtype": _BF16, "reduce_dtype": _BF16, "output_dtype": _BF16}, None),
        ({"param_dtype": _FP16, "reduce_dtype": _FP16, "output_dtype": _FP16}, None),
        ({"param_dtype": _BF16, "reduce_dtype": _FP32, "output_dtype": _BF16}, None),
        ({"param_dtype": _BF16, "reduce_dtype": _BF16, "output_dtype": _FP32}, _FP32),
        ({"param_dtype": _BF16, "reduce_dtype": _BF16, "output_dtype": None}, None),
        ({}, None),
    ],
)
def test_outputs_are_not_rounded_unless_the_script_says_so(
    policy: dict[str, Any], returned_in: torch.dtype | None
) -> None:
    plugin = SimpleNamespace(mixed_precision_policy=MixedPrecisionPolicy(**policy))
    keep_output_formats(plugin)
    kept = plugin.mixed_precision_policy
    assert kept.output_dtype == returned_in
    assert (kept.param_dtype, kept.reduce_dtype) == (policy.get("param_dtype"), policy.get("reduce_dtype"))


@pytest.mark.parametrize("policy", [None, {"param_dtype": "bf16"}])
def test_no_policy_and_one_that_is_not_made_yet_are_left(policy: Any) -> None:
    plugin = SimpleNamespace(mixed_precision_policy=policy)
    keep_output_formats(plugin)
    assert plugin.mixed_precision_policy == policy
