"""flash-attn without the package: as PyTorch's flash kernel where nothing is padded, unpadded where it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_traces import run_once
from torch._subclasses.fake_tensor import FakeTensorMode

from zerofit.core.allocation_log import CostKind, Event, Pass, TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.models.trace.attention import flash_package
from zerofit.models.trace.recorder import Recorder, watching

if TYPE_CHECKING:
    from zerofit.models.trace.raw import RawLog

_LOW = TraceRequest(
    sequence_length=16, is_padded=False, weights=Precision.BF16, attention="flash_attention_2"
)
_AUTOCAST = replace(_LOW, weights=Precision.FP32, autocast=Precision.FP16, gradient_checkpointing=True)
_HOPPER = replace(_LOW, attention="flash_attention_3", compute_capability=(9, 0))
_SCALARS = 64
"""Bytes up to which a storage is left out: the two ask in other words whether the mask hides anything."""


def _events(log: RawLog) -> list[tuple[Any, ...]]:
    return [
        (code, log.num_bytes[argument], log.kinds[argument])
        for code, argument in zip(log.codes, log.arguments, strict=True)
        if code in (Event.ALLOCATE, Event.FREE) and log.num_bytes[argument] > _SCALARS
    ]


_REST = [
    (name, request)
    for name in ("bert", "gpt2", "bart", "whisper", "vit", "mixtral")
    for request in (_LOW, _AUTOCAST, _HOPPER)
]


@pytest.mark.parametrize(
    ("name", "request_"),
    [("llama", _LOW), *(pytest.param(*case, marks=pytest.mark.evidence) for case in _REST)],
)
def test_without_padding_it_allocates_what_sdpa_does(name: str, request_: TraceRequest) -> None:
    ampere = replace(request_, attention="sdpa", compute_capability=(8, 0))  # on Hopper it would take cuDNN
    package, built_in = run_once(name, request_), run_once(name, ampere)
    assert any("flash" in name for name in built_in.operator_names)
    assert _events(package) == _events(built_in)


def test_a_padded_batch_is_gathered_and_makes_no_square_of_its_length() -> None:
    padded = replace(_LOW, is_padded=True)
    short, long = (
        run_once("llama", replace(padded, sequence_length=length), num_layers=1) for length in (128, 256)
    )
    assert long.codes == short.codes
    assert all(
        more <= 2 * less
        for less, more in zip(short.num_bytes, long.num_bytes, strict=True)
        if less > _SCALARS
    )
    gathers = [index for index in short.operators if short.operator_names[index] == "aten.index.Tensor"]
    assert len(gathers) == 3 + 1  # query, key and value; and the gradient of what is put back


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_sliding_window_costs_only_the_scores_it_sees(is_padded: bool, again: bool) -> None:
    request = replace(_LOW, is_padded=is_padded, gradient_checkpointing=again)
    found: Counter[Pass] = Counter()
    for call in run_once("gemma3", request, num_layers=1, samples=3).calls:
        if call.kind is CostKind.ATTENTION:
            found[call.during] += call.flops
    seen = 8 * 16 - 7 * 8 // 2  # by 16 queries, of 8 keys each but for the first 7
    forward = 2 * 2 * 3 * 4 * 8 * seen  # products, multiply and add, samples, heads, channels
    assert found.pop(Pass.RECOMPUTATION, forward) == forward
    assert found == {Pass.FORWARD: forward, Pass.BACKWARD: 5 * forward // 2}


@pytest.mark.parametrize("head_dim", [60, 64])
def test_a_window_counts_for_its_own_call_whatever_the_head_size(head_dim: int) -> None:
    from transformers import modeling_flash_attention_utils as package

    recorder = Recorder(is_padded=False, as_on_cuda=True)
    with flash_package(_LOW), FakeTensorMode():
        package.lazy_import_flash_attention("flash_attention_2")
        query = torch.empty(1, 16, 2, head_dim, dtype=torch.bfloat16, requires_grad=True)
        with watching(recorder):
            for window in (3, -1):
                package._flash_fn(query, query, query, window_size=(window, window)).sum().backward()
    found = [call.flops for call in recorder.log.calls if call.kind is CostKind.ATTENTION]
    per_score = 2 * 2 * 2 * 64  # products, multiply and add, heads, channels with their padding
    seen = 7 * 16 - 2 * (1 + 2 + 3)  # of 16 queries, 7 keys each but at both ends
    assert found == [per_score * seen, per_score * seen * 5 // 2, per_score * 256, per_score * 256 * 5 // 2]


@pytest.mark.parametrize(
    ("request_", "rule"),
    [
        (replace(_LOW, weights=Precision.FP32), "flash-attention-needs-16-bit"),
        (replace(_LOW, compute_capability=(7, 5)), "flash-attention-needs-newer-gpu"),
        (replace(_HOPPER, compute_capability=(8, 0)), "flash-attention-needs-newer-gpu"),
    ],
)
def test_what_the_package_has_no_kernels_for_is_an_error(request_: TraceRequest, rule: str) -> None:
    with pytest.raises(UserError) as caught, flash_package(request_):
        pass
    assert caught.value.rule == rule


def test_transformers_is_left_as_it_was() -> None:
    from transformers import modeling_flash_attention_utils as package

    before = package._lazy_imports, package._loaded_implementation, package._flash_fn
    with flash_package(_LOW):
        package.lazy_import_flash_attention("flash_attention_2")
        assert package._flash_fn is not before[-1]
    assert (package._lazy_imports, package._loaded_implementation, package._flash_fn) == before
