"""Replication: few layers, repeated, are event by event what all layers do."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.allocation_log import TraceRequest
from zerofit.probe.trace.entry import trace_config
from zerofit.strategy import Lora, Precision

_PLAIN = TraceRequest(sequence_length=16)
_LEAN = TraceRequest(
    sequence_length=16, is_padded=False, autocast=Precision.BF16, gradient_checkpointing=True
)
_ADAPTED = TraceRequest(
    sequence_length=16, weights=Precision.BF16, lora=Lora(rank=4, target_modules=("q_proj", "v_proj"))
)
_FROZEN = TraceRequest(sequence_length=16, weights=Precision.BF16, freeze=("*embed*",))

_FAST = [("llama", _PLAIN, 7), ("t5", _PLAIN, 7)]
_REST = [
    *((name, _PLAIN, 9) for name in ("bert", "gpt2", "mixtral", "bart", "vit", "deberta", "whisper")),
    ("gemma3", _PLAIN, 14),
    ("qwen3-moe", _PLAIN, 8),
    *((name, _LEAN, 8) for name in ("llama", "bert", "t5", "mixtral")),
    ("gemma3", _LEAN, 14),
    ("llama", _ADAPTED, 8),
    ("llama", _FROZEN, 8),
]


def _check(make_tiny: Any, name: str, request_: TraceRequest, num_layers: int) -> None:
    config, build = make_tiny(name, num_layers)
    said: list[str] = []
    short = trace_config(config, build, request_, on_progress=said.append)
    whole = trace_config(config, build, request_, all_layers=True)
    assert f"of {num_layers} layers" in said[-1], "it fell back to all layers"
    assert short == whole


@pytest.mark.parametrize(("name", "request_", "num_layers"), _FAST)
def test_a_replicated_log_is_the_log_of_all_layers(
    make_tiny: Any, name: str, request_: TraceRequest, num_layers: int
) -> None:
    _check(make_tiny, name, request_, num_layers)


@pytest.mark.evidence
@pytest.mark.parametrize(("name", "request_", "num_layers"), _REST)
def test_a_replicated_log_is_the_log_of_all_layers_in_every_family(
    make_tiny: Any, name: str, request_: TraceRequest, num_layers: int
) -> None:
    _check(make_tiny, name, request_, num_layers)
