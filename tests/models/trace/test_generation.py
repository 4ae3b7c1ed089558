"""The traced passes of generation, against tensors and caches of real generate() calls on the CPU."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from real_models import CONFIGS, MORE_CONFIGS, build_real, real_model

from zerofit.core.allocation_log import AllocationLog, Event, TensorKind, TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.core.units import KIB, MIB
from zerofit.models.find import probe_model
from zerofit.models.trace.generation import GenerateCall, GenerationTrace, trace_call, trace_generation

if TYPE_CHECKING:
    from collections.abc import Mapping

_BATCH = 3
_SHORT, _LONG = (4, 40), (200, 2)
"""Tokens of the prompt, and new ones."""
_IDS = 4096
"""Bytes of token ids, positions and masks that generate() holds beside: much only for models this small."""
_BEAMS = 4 * _IDS
"""Bytes of the sequences, indices and scores of three beams, which beam search holds twice."""
_SCALARS = 64
"""Bytes of scalars that layers with a sliding window keep beside keys and values."""
_DEEP: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_hidden_layers": 5},
    "t5": {"num_layers": 6},
}
"""Models with so many layers that few of them are traced."""


def _traced(
    family: str,
    lengths: tuple[int, int],
    *,
    all_layers: bool = False,
    call: Mapping[str, Any] | None = None,
    **changes: Any,
) -> GenerationTrace:
    prompt, new_tokens = lengths
    made = {"samples": False, **(call or {})}
    return trace_call(
        build_real(family, **changes),
        GenerateCall(prompt_length=prompt, max_new_tokens=new_tokens, **made),
        TraceRequest(sequence_length=prompt, weights=Precision.FP32),
        name=family,
        as_on_cuda=False,
        all_layers=all_layers,
    )


def _live(log: AllocationLog, samples: int, kinds: frozenset[TensorKind] | None = None) -> list[int]:
    """Return the bytes of some kinds after each allocation or free."""
    found, now, storages = [0], 0, log.storages
    for code, index in zip(log.codes, log.arguments, strict=True):
        if code in (Event.ALLOCATE, Event.FREE) and (kinds is None or storages.kinds[index] in kinds):
            size = storages.fixed_bytes[index] + samples * storages.bytes_per_sample[index]
            now += size if code == Event.ALLOCATE else -size
            found.append(now)
    return found


def _peak(trace: GenerationTrace) -> int:
    return max(max(_live(one.log_for(_BATCH), _BATCH)) for one in (trace.prefill, trace.decode))


def _cached(trace: GenerationTrace) -> int:
    return _live(trace.decode.log_for(_BATCH), _BATCH, frozenset([TensorKind.CACHE]))[-1]


def _generate(
    family: str, lengths: tuple[int, int], *, num_beams: int = 1, **changes: Any
) -> tuple[int, int]:
    """Return the bytes of a real call: the most of its tensors at one time, without weights; of its cache."""
    import torch
    from memory.track import Tracker

    prompt, new_tokens = lengths
    model = real_model(family, **changes)
    tokens = torch.full((_BATCH, prompt), 3)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0  # padding, so that there is a mask
    with Tracker() as tracker:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.view(-1)  # known from here on, so that it is no birth later
        tracker.phase("generate")
        found = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            num_beams=num_beams,
            return_dict_in_generate=True,
        )
        events = list(tracker.phases[-1].events)
    live = most = 0
    for sign, born in events:
        live += sign * born.nbytes
        most = max(most, live)
    return most, _bytes_of(found.past_key_values)


def _bytes_of(past: Any) -> int:
    parts = (
        [past.self_attention_cache, past.cross_attention_cache]
        if hasattr(past, "cross_attention_cache")
        else [past]
    )
    layers = [layer for part in parts for layer in part.layers]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in layers
        for tensor in (layer.keys, layer.values)
        if tensor is not None
    }
    return sum(storages.values())


_SLOW, _EVIDENCE = pytest.mark.slow, pytest.mark.evidence


@pytest.mark.parametrize(
    ("family", "lengths", "changes"),
    [
        ("llama", _SHORT, {}),  # two key-value heads for eight query heads
        pytest.param("t5", _LONG, {}, marks=_SLOW),
        pytest.param("gpt2", _LONG, {}, marks=_SLOW),
        pytest.param("mistral", (30, 20), {"sliding_window": 16}, marks=_SLOW),
        pytest.param("deepseek_v3", _SHORT, {}, marks=_SLOW),
        *(pytest.param(family, _LONG, {}, marks=_SLOW) for family in CONFIGS),
        *(
            pytest.param(family, lengths, {}, marks=_EVIDENCE)
            for family in (*CONFIGS, *MORE_CONFIGS)
            for lengths in (_SHORT, _LONG)
        ),
    ],
)
def test_traced_tensors_are_those_of_a_real_call(
    family: str, lengths: tuple[int, int], changes: dict[str, Any]
) -> None:
    trace = _traced(family, lengths, **changes)
    most, cached = _generate(family, lengths, **changes)
    assert _cached(trace) == pytest.approx(cached, abs=_SCALARS)
    assert _peak(trace) == pytest.approx(most, rel=0.02, abs=_IDS)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_beams_have_caches_of_their_own(family: str) -> None:
    most, cached = _generate(family, _SHORT, num_beams=3)
    trace = _traced(family, _SHORT, call={"num_beams": 3})
    assert _cached(trace) == cached
    assert most <= 1.02 * _peak(trace) + _BEAMS


@pytest.mark.parametrize(
    ("family", "num_beams"),
    [
        pytest.param("llama", 1, marks=_SLOW),
        pytest.param("t5", 3, marks=_SLOW),
        pytest.param("llama", 3, marks=_SLOW),
        pytest.param("t5", 1, marks=_SLOW),
    ],
)
def test_few_layers_stand_for_all(family: str, num_beams: int) -> None:
    call = {"num_beams": num_beams}
    few = _traced(family, (20, 5), call=call, **_DEEP[family])
    every = _traced(family, (20, 5), call=call, all_layers=True, **_DEEP[family])
    for one, other in ((few.prefill, every.prefill), (few.decode, every.decode)):
        for samples in (1, 2, 7):
            assert _live(one.log_for(samples), samples) == _live(other.log_for(samples), samples)


@_SLOW
@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_last_layers_of_a_deep_model_are_not_run(num_beams: int) -> None:
    def build(dtype: Any) -> Any:
        model = build_real("llama", **_DEEP["llama"])(dtype=dtype)
        model.model.layers[-1].forward = lambda *_, **__: 1 / 0
        return model

    call = GenerateCall(prompt_length=4, max_new_tokens=3, num_beams=num_beams)
    trace_call(build, call, TraceRequest(sequence_length=4), name="llama")


@cache
def _of_catalog(name: str, precision: Precision, new_tokens: int) -> GenerationTrace:
    call = GenerateCall(prompt_length=32, max_new_tokens=new_tokens)
    request = TraceRequest(sequence_length=32, weights=precision)
    return trace_generation(probe_model(name), call, request, cache_folder=None)


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        # "approximately 0.5 MB per token" of Llama-2-7B in 16 bits, 2 x 32 layers x 4096 x 2 bytes:
        # https://developer.nvidia.com/blog/mastering-llm-techniques-inference-optimization/
        pytest.param("llama-2-7b", Precision.FP16, 512 * KIB, marks=_SLOW),
        pytest.param("llama-2-7b", Precision.FP32, 1 * MIB, marks=_SLOW),
        # "800 KB" a token of OPT-13B, 2 x 5120 x 40 layers x 2 bytes:
        # https://arxiv.org/abs/2309.06180, section 3
        pytest.param("opt-13b", Precision.FP16, 800 * KIB, marks=_SLOW),
        # 8 key-value heads for 32 query heads: a quarter of Llama-2-7B's.
        pytest.param("llama-3-8b", Precision.BF16, 128 * KIB, marks=_SLOW),
        # 320 KiB: 80 layers, 8 key-value heads of 128: https://arxiv.org/abs/2307.09288, table 1
        pytest.param("llama-2-70b", Precision.FP16, 320 * KIB, marks=_SLOW),
        pytest.param("gpt2", Precision.FP32, 2 * 12 * 768 * 4, marks=_SLOW),
        # The decoder alone caches its own tokens: 12 of the 24 layers.
        pytest.param("t5-base", Precision.FP32, 2 * 12 * 768 * 4, marks=_SLOW),
    ],
)
def test_bytes_of_a_token(name: str, precision: Precision, expected: int) -> None:
    sizes = []
    for new_tokens in (9, 17):
        log = _of_catalog(name, precision, new_tokens).decode.log_for(1)
        sizes.append(_live(log, 1, frozenset([TensorKind.CACHE]))[-1])
    assert (sizes[1] - sizes[0]) / 8 == expected


@pytest.mark.slow
def test_a_completion_of_one_token_has_no_second_pass() -> None:
    trace = _traced("gpt2", (10, 1))
    assert trace.decode == trace.prefill


def test_a_model_that_fails_on_fake_tensors_is_named() -> None:
    def build(dtype: object) -> Any:
        model = real_model("gpt2")
        model.forward = lambda **_: 1 / 0
        return model

    call = GenerateCall(prompt_length=4, max_new_tokens=2)
    request = TraceRequest(sequence_length=4)
    with pytest.raises(UserError, match="can't run on fake tensors"):
        trace_call(build, call, request, name="broken")
