"""Memory of a GPU that generates: the laws of layouts, ranks and batches, and what each phase holds."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
from inference_facts import GPU_80, facts, weights, workload

from zerofit.core.estimates import Holder, MemoryEstimate, RunPhase
from zerofit.core.facts import ModelFacts
from zerofit.core.strategy import OffloadDevice, Precision
from zerofit.generation.generation_job import Gather
from zerofit.planning.estimate.device_memory.allocator import CachingAllocator, OutOfMemoryError
from zerofit.planning.inference.forward_log import forward_log
from zerofit.planning.inference.memory import GATHERED_ONCE, REST_SHARE, Weights, device_memory

_MODELS = ["gpt2", "llama-3-8b", "llama-2-70b", "t5-base", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"]


def _memory(held: Weights, batch_size: int = 1, **fields: int) -> MemoryEstimate:
    return device_memory(held, workload(**fields), batch_size=batch_size, gpu=GPU_80)


def _weight_bytes(held: Weights) -> int:
    """Return the bytes of weights, gathered ones too, at the largest moment of a pass."""
    names = ("weights", "gathered weights", "all-gather buffer", GATHERED_ONCE)
    return sum(term.num_bytes for term in held.generate if term.name in names)


@pytest.mark.parametrize("name", _MODELS)
def test_a_pass_holds_every_parameter_once(name: str) -> None:
    log = forward_log(facts(name), Precision.BF16)
    assert sum(one.num_elements for one in log.parameters) == facts(name).num_parameters
    assert all(one.num_elements > 0 for one in log.parameters)


@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
def test_a_whole_model_is_its_parameters(name: str, precision: Precision) -> None:
    width = 4 if precision is Precision.FP32 else 2
    assert _weight_bytes(weights(facts(name), precision=precision)) == width * facts(name).num_parameters


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-70b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_zero3_needs_no_more_weight_bytes_than_the_whole_model(name: str, ranks: int) -> None:
    """Of a model that is larger than what ZeRO-3 gathers at one time, 1e9 parameters."""
    model = facts(name)
    assert _weight_bytes(weights(model, ranks=ranks, stage=3)) <= _weight_bytes(weights(model))


@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize("offload", list(OffloadDevice))
def test_more_ranks_never_hold_more_weights(name: str, offload: OffloadDevice) -> None:
    sizes = [
        _weight_bytes(weights(facts(name), ranks=ranks, stage=3, offload=offload)) for ranks in (2, 4, 8, 16)
    ]
    padding = 16 * 2 * len(forward_log(facts(name), Precision.BF16).parameters)
    assert all(later <= former + padding for former, later in pairwise(sizes))


@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize("ranks", [1, 8])
def test_offloaded_parts_leave_the_gpu(name: str, ranks: int) -> None:
    stays = weights(facts(name), ranks=ranks, stage=3)
    leaves = weights(facts(name), ranks=ranks, stage=3, offload=OffloadDevice.CPU)
    part = 2 * facts(name).num_parameters // ranks
    held = {term.name: term.num_bytes for term in leaves.generate}
    assert "weights" not in held
    assert sum(term.num_bytes for term in stays.generate if term.name == "weights") >= part


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "t5-base"])
@pytest.mark.parametrize("stage", [0, 3])
def test_more_is_never_less(name: str, stage: int) -> None:
    held = weights(facts(name), ranks=8, stage=stage)

    def peak(batch_size: int, **fields: int) -> int:
        return _memory(held, batch_size, **fields).peak_bytes

    by_batch = [peak(size) for size in (1, 2, 4, 8, 16)]
    assert by_batch == sorted(by_batch)
    for field in ("longest_prompt", "max_new_tokens", "num_beams", "num_return_sequences"):
        grown = [peak(4, **{field: number}) for number in (1, 8, 64)]
        assert grown == sorted(grown)


def test_each_phase_is_the_sum_of_its_terms() -> None:
    estimate = _memory(weights(facts("llama-3-8b"), ranks=8, stage=3), 4)
    assert [phase.phase for phase in estimate.phases] == [RunPhase.LOAD, RunPhase.PREFILL, RunPhase.DECODE]
    for phase in estimate.phases:
        assert phase.total_bytes == sum(term.num_bytes for term in phase.terms)
        assert all(term.num_bytes >= 0 and term.formula and term.source for term in phase.terms)


def test_gathered_once_holds_the_whole_model_beside_the_parts() -> None:
    """Nothing is gathered layer by layer then, and what stays for the whole call leaves no holes."""
    model = facts("llama-3-8b")
    once = weights(model, ranks=8, stage=3, gather=Gather.ALWAYS)
    assert {term.name: term.num_bytes for term in once.generate if "weights" in term.name} == {
        "weights": pytest.approx(2 * model.num_parameters / 8, rel=1e-3),
        GATHERED_ONCE: 2 * model.num_parameters,
    }
    assert all(term.name not in ("gathered weights", "all-gather buffer") for term in once.generate)
    whole = _memory(weights(model), 4).of(RunPhase.DECODE)
    found = _memory(once, 4).of(RunPhase.DECODE)
    assert found is not None
    assert whole is not None
    assert found.held_by(Holder.CACHE) == whole.held_by(Holder.CACHE)


def test_gathering_once_has_a_bucket_beside_all_weights() -> None:
    once = weights(facts("llama-3-8b"), ranks=8, stage=3, gather=Gather.ALWAYS)
    found = _memory(once).of(RunPhase.INITIALISE)
    assert found is not None
    buffer = sum(term.num_bytes for term in found.terms if term.name == "all-gather buffer")
    assert buffer == 2 * facts("llama-3-8b").largest_parameter


def test_one_rank_that_has_everything_gathers_nothing() -> None:
    model = facts("llama-3-8b")
    assert weights(model, stage=3, gather=Gather.ALWAYS).generate == weights(model, stage=3).generate


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # All experts' gate_up_proj and down_proj: two parameters of one module.
        ("mixtral-8x7b", (2 * 8 * 4096 * 14336, 8 * 4096 * 14336)),
        ("qwen3-30b-a3b", (2 * 128 * 2048 * 768, 128 * 2048 * 768)),
        # gate_up_proj, a module of its own.
        ("phi-3-mini-4k-instruct", (2 * 3072 * 8192,)),
        # gate_proj, up_proj and down_proj are three.
        ("llama-2-7b", (4096 * 11008,)),
    ],
)
def test_matrices_come_as_transformers_keeps_them(name: str, expected: tuple[int, ...]) -> None:
    log = forward_log(facts(name), Precision.BF16)
    held = [tuple(log.parameters[one].num_elements for one in numbers) for numbers in log.module_parameters]
    assert max(held[2:-1], key=sum) == expected


def test_experts_of_a_layer_are_gathered_together_with_their_flat_buffer() -> None:
    """Also where some layers have no experts, so that layers are cut evenly: 256 experts of DeepSeek-V3."""
    model = facts("deepseek-v3")
    experts = 2 * 256 * 3 * 7168 * 2048
    held = {
        term.name: term.num_bytes
        for term in weights(model, ranks=8, stage=3, offload=OffloadDevice.CPU).generate
    }
    assert held["gathered weights"] > 0.9 * experts
    assert held["all-gather buffer"] > 0.9 * experts


@pytest.mark.parametrize(("name", "uncertainty"), [("llama-3-8b", 0.1), ("deepseek-v2-lite", 0.25)])
def test_a_family_that_was_not_compared_is_less_certain(name: str, uncertainty: float) -> None:
    assert _memory(weights(facts(name))).uncertainty == uncertainty


def test_a_tied_head_keeps_the_embedding_through_the_pass() -> None:
    """The head asks for it again within max_reuse_distance, so that ZeRO-3 does not release it."""
    model = facts("gpt2")
    table = 2 * model.vocab_size * model.hidden_size
    held = {term.name: term.num_bytes for term in weights(model, ranks=2, stage=3).generate}
    assert held["gathered weights"] + held.get("all-gather buffer", 0) >= table


def test_what_the_allocator_keeps_says_that_it_is_assumed() -> None:
    estimate = _memory(weights(facts("llama-3-8b")), 8)
    (rest,) = (term for term in estimate.peak.terms if term.holder is Holder.CACHE)
    assert rest.source.startswith("ASSUMPTION")


def _unknown() -> ModelFacts:
    """Return a model of an unknown family, whose dimensions add up to more than its parameters."""
    return ModelFacts(
        name="unknown",
        model_type="unknown",
        num_parameters=10_000_000,
        num_trainable_parameters=10_000_000,
        num_layers=4,
        hidden_size=1024,
        vocab_size=1000,
        is_causal=True,
    )


def test_a_model_smaller_than_its_dimensions_say_is_cut_evenly() -> None:
    log = forward_log(_unknown(), Precision.BF16)
    assert sum(one.num_elements for one in log.parameters) == 10_000_000


_LAYERS, _PROMPT, _TOKENS = 32, 256, 384
_KEY_BYTES, _WORK_BYTES = 8 * 4096 * 2, 3 * 8 * 14336 * 2
"""A token of a batch of 8: of one layer's keys, and of what its feed-forward block makes."""


def _ends(capacity: int) -> bool:
    """Return True if a cache grows to its final size in this memory, beside the tensors of each layer."""
    allocator = CachingAllocator(capacity=capacity)
    cache: dict[tuple[int, int], Any] = {}
    try:
        for tokens in range(_PROMPT, _TOKENS):
            new = tokens if tokens == _PROMPT else 1
            for place in product(range(_LAYERS), range(2)):
                grown = allocator.allocate(_KEY_BYTES * tokens, 0)
                if place in cache:
                    allocator.free(cache[place])
                cache[place] = grown
                allocator.free(allocator.allocate(_WORK_BYTES * new, 0))
    except OutOfMemoryError:
        return False
    return True


def test_a_cache_grows_to_its_end_within_what_the_allocator_is_given() -> None:
    """Without spare memory it would not: a freed block is a token too small for the next cache."""
    first = 2 * _LAYERS * _KEY_BYTES * _PROMPT + _WORK_BYTES * _PROMPT
    tensors = max(first, (2 * _LAYERS + 1) * _KEY_BYTES * _TOKENS)
    assert _ends(int((1 + REST_SHARE) * tensors))
    assert not _ends(tensors)
