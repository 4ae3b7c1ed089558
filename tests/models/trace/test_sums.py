"""Sums of gradients are in place where autograd's are: beside a real backward pass on the CPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tiny_traces import run_once, tiny
from torch.profiler import ProfilerActivity, profile

from zerofit.core.allocation_log import TensorKind, TraceRequest
from zerofit.models.trace.batches import make_batch

_SAMPLES = 2
_REQUEST = TraceRequest(sequence_length=16, attention="eager")


def _traced(name: str) -> Counter[int]:
    log = run_once(name, _REQUEST, samples=_SAMPLES)
    return Counter(
        num_bytes for kind, num_bytes in zip(log.kinds, log.num_bytes, strict=True) if kind is TensorKind.SUM
    )


def _real(name: str) -> Counter[int]:
    config, build = tiny(name, 2)
    model = build(config, dtype=torch.float32, attn_implementation="eager")
    loss = model(**make_batch(model, _SAMPLES, _REQUEST)).loss
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as recorded:
        loss.backward()
    adds = [event for event in recorded.events() if event.name == "aten::add"]
    return Counter(one.cpu_memory_usage for one in adds if one.input_shapes[:1] == one.input_shapes[1:2])


@pytest.mark.parametrize(
    "name",
    ["llama", pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("vit", marks=pytest.mark.slow)],
)
def test_a_gradient_is_added_in_place_unless_the_first_one_is_a_view(name: str) -> None:
    real = _real(name)

    assert real
    assert _traced(name) == real


@pytest.mark.parametrize(("name", "num_more"), [("bert", 2), pytest.param("t5", 1, marks=pytest.mark.slow)])
def test_where_a_module_shares_its_input_one_sum_a_layer_more_may_be_counted(
    name: str, num_more: int
) -> None:
    """The tracer sums what a module's input gets before it adds that of others, such as a residual's."""
    real, traced = _real(name), _traced(name)

    assert real <= traced
    assert (traced - real).total() == num_more
