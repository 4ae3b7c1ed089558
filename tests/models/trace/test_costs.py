"""The operations of experts' products, which PyTorch's registry of formulas lacks."""

from __future__ import annotations

from collections import Counter

import pytest
from tiny_traces import run_once

from zerofit.core.allocation_log import EXPERT_ROWS, CostKind, Pass, TraceRequest
from zerofit.core.strategy import Lora, Precision

_LENGTH, _SAMPLES, _LAYERS = 16, 3, 2
_EXPERTS, _EXPERTS_PER_TOKEN, _HIDDEN = 4, 2, 32
_ROWS = _SAMPLES * _LENGTH * _EXPERTS_PER_TOKEN + EXPERT_ROWS * _EXPERTS


def _operations(name: str, request: TraceRequest) -> dict[Pass, int]:
    """Return the operations of experts' products by pass."""
    found: Counter[Pass] = Counter()
    for call in run_once(name, request, num_layers=_LAYERS, samples=_SAMPLES).calls:
        if call.kind is CostKind.GROUPED:
            found[call.during] += call.flops
    return dict(found)


@pytest.mark.parametrize(("name", "intermediate"), [("mixtral", 48), ("qwen3-moe", 24)])
@pytest.mark.parametrize("weights", [Precision.BF16, Precision.FP32], ids=["torch's", "transformers'"])
def test_experts_multiply_by_three_matrices_and_twice_again_backward(
    name: str, intermediate: int, weights: Precision
) -> None:
    request = TraceRequest(sequence_length=_LENGTH, is_padded=False, weights=weights)
    forward = _LAYERS * 2 * _ROWS * 3 * _HIDDEN * intermediate

    assert _operations(name, request) == {Pass.FORWARD: forward, Pass.BACKWARD: 2 * forward}


def test_frozen_experts_multiply_once_backward() -> None:
    lora = Lora(rank=4, target_modules=("q_proj",))
    request = TraceRequest(sequence_length=_LENGTH, is_padded=False, weights=Precision.BF16, lora=lora)
    found = _operations("mixtral", request)

    assert found[Pass.BACKWARD] == found[Pass.FORWARD]
