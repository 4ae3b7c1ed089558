"""4-bit weights that FSDP2 would cast while it gathers them are refused before they are sharded."""

from __future__ import annotations

from types import SimpleNamespace

import bitsandbytes as bnb
import pytest
import torch
from refusals import refusal
from torch import nn

from zerofit.training.setup import sharded_model


def _packed(stored_in: torch.dtype) -> nn.Module:
    layer = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", quant_storage=stored_in)
    return nn.Sequential(nn.Linear(64, 64), layer.to("cpu"))


_FP32, _BF16, _FP16, _BYTES = torch.float32, torch.bfloat16, torch.float16, torch.uint8


@pytest.mark.parametrize(
    ("stored_in", "computes_in", "found"),
    [
        (_BF16, _BF16, ""),
        (_FP16, _FP16, ""),
        (_FP32, None, ""),
        (_BF16, None, ""),
        (_BYTES, _BF16, ""),  # accelerate leaves them whole
        (_FP32, _BF16, "1.weight is stored in float32, mixed precision is bfloat16"),
        (_BF16, _FP16, "1.weight is stored in bfloat16, mixed precision is float16"),
        (_FP16, _BF16, "1.weight is stored in float16, mixed precision is bfloat16"),
    ],
)
def test_the_storage_of_4_bit_weights_is_the_dtype_they_are_gathered_in(
    stored_in: torch.dtype, computes_in: torch.dtype | None, found: str
) -> None:
    policy = SimpleNamespace(param_dtype=computes_in)
    if not found:
        sharded_model._check_storage(_packed(stored_in), policy)
        return
    error = refusal(sharded_model._check_storage, _packed(stored_in), policy)
    assert (error.rule, error.found) == ("packed-weights-cast-by-fsdp2", found)
    assert error.fix == f"load the model with bnb_4bit_quant_storage={computes_in}"


@pytest.mark.parametrize("policy", [None, SimpleNamespace(param_dtype=None), SimpleNamespace()])
def test_without_mixed_precision_any_storage_is_kept(policy: object) -> None:
    sharded_model._check_storage(_packed(_FP16), policy)
