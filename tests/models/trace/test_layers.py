"""Replication: few layers, repeated, are event by event what all layers do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_traces import run_once, tiny

from zerofit.core.allocation_log import AllocationLog, TraceRequest
from zerofit.core.strategy import Lora, Precision
from zerofit.models.trace.affine import exact, to_allocation_log
from zerofit.models.trace.entry import trace_config
from zerofit.models.trace.layers import find_stacks
from zerofit.models.trace.raw import Skeleton

_PLAIN = TraceRequest(sequence_length=16)
_LEAN = TraceRequest(
    sequence_length=16, is_padded=False, autocast=Precision.BF16, gradient_checkpointing=True
)
_SECOND = TraceRequest(sequence_length=16, is_padded=False, gradient_checkpointing=True, checkpoint_every=2)
_ADAPTED = TraceRequest(
    sequence_length=16, weights=Precision.BF16, lora=Lora(rank=4, target_modules=("q_proj", "v_proj"))
)
_FROZEN = TraceRequest(sequence_length=16, weights=Precision.BF16, freeze=("*embed*",))

_FAST = [("gpt2", _PLAIN, 5), pytest.param("bart", _PLAIN, 5, marks=pytest.mark.slow)]
_REST = [
    *((name, _PLAIN, 9) for name in ("llama", "bert", "gpt2", "mixtral", "t5", "bart", "vit", "deberta")),
    ("whisper", _PLAIN, 9),
    ("gemma3", _PLAIN, 14),
    *((name, _PLAIN, 8) for name in ("qwen3-moe", "deepseek-v2", "gpt-oss", "mamba")),
    *((name, _LEAN, 8) for name in ("qwen3-moe", "deepseek-v2")),
    *((name, _LEAN, 8) for name in ("llama", "bert", "t5", "mixtral")),
    ("gemma3", _LEAN, 14),
    ("llama", _SECOND, 11),
    ("bert", _SECOND, 11),
    ("gemma3", _SECOND, 22),
    ("llama", _ADAPTED, 8),
    ("llama", _FROZEN, 8),
]


def _at(log: AllocationLog, samples: int) -> tuple[Any, ...]:
    """Return all that a log says of a micro-batch of so many samples."""
    storages = log.storages
    costs: Counter[tuple[Any, ...]] = Counter()
    for cost in log.costs:
        flops = cost.fixed_flops + samples * cost.flops_per_sample
        moved = cost.fixed_bytes + samples * cost.bytes_per_sample
        costs[cost.operator, cost.kind, cost.during, cost.precision, flops, moved] += cost.count
    return (
        log.codes,
        log.arguments,
        log.gradient_storages,
        storages.kinds,
        storages.modules,
        [log.operators[number] for number in storages.operators],
        [
            fixed + samples * each
            for fixed, each in zip(storages.fixed_bytes, storages.bytes_per_sample, strict=True)
        ],
        costs,
    )


@pytest.mark.parametrize(("name", "request_", "num_layers"), _FAST)
def test_a_replicated_log_is_at_any_size_what_all_layers_do(
    name: str, request_: TraceRequest, num_layers: int
) -> None:
    config, build = tiny(name, num_layers)
    said: list[str] = []
    short = trace_config(config, build, request_, on_progress=said.append)
    assert f"of {num_layers} layers" in said[-1], "it fell back to all layers"
    log = short.log_for(5)
    skeleton = Skeleton(
        modules=log.modules,
        module_parameters=log.module_parameters,
        parameters=log.parameters,
        buffer_bytes=log.buffer_bytes,
    )
    raw = run_once(name, request_, num_layers=num_layers, samples=5)
    assert _at(log, 5) == _at(to_allocation_log(exact(raw), skeleton, 5), 5)


@pytest.mark.evidence
@pytest.mark.parametrize(("name", "request_", "num_layers"), _REST)
def test_a_replicated_log_is_the_log_of_all_layers_in_every_family(
    name: str, request_: TraceRequest, num_layers: int
) -> None:
    config, build = tiny(name, num_layers)
    said: list[str] = []
    short = trace_config(config, build, request_, on_progress=said.append)
    whole = trace_config(config, build, request_, all_layers=True)
    assert f"of {num_layers} layers" in said[-1], "it fell back to all layers"
    assert short == whole


def _list(*layers: torch.nn.Module | None) -> torch.nn.Module:
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})


@pytest.mark.parametrize(
    ("model", "stacks"),
    [
        (_list(*(torch.nn.Linear(2, 2) for _ in range(8))), ["layers"]),
        (_list(None, *(torch.nn.Linear(2, 2) for _ in range(8))), []),
        (_list(*(torch.nn.Linear(2, 2) if place % 2 else None for place in range(8))), []),
        (_list(*(_list(torch.nn.Linear(2, 2), None) for _ in range(8))), ["layers"]),
        (_list(None, None, None, None, None, None), []),
        (_list(_list(*(torch.nn.Linear(2, 2) for _ in range(8))), None), ["layers.0.layers"]),
    ],
)
def test_a_list_with_none_in_it_is_traced_whole(model: torch.nn.Module, stacks: list[str]) -> None:
    assert [stack.path for stack in find_stacks(model)] == stacks
