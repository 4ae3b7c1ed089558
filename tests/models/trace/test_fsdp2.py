"""FSDP2 in a trace: the engine itself runs as rank 0, and its log follows from few layers exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
from tiny_traces import run_sharded_once, tiny

from zerofit.core.allocation_log import AllocationLog, Event, Packing, Sharding, TensorKind, TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.strategy import Lora, Precision, Quantization
from zerofit.models.trace.entry import trace_config

_TWO = Sharding(shard_size=2)
_LAYERS = 8


def _request(sharding: Sharding = _TWO, **fields: Any) -> TraceRequest:
    return TraceRequest(sequence_length=16, sharding=sharding, **fields)


@cache
def _log(name: str, request: TraceRequest) -> AllocationLog:
    return run_sharded_once(name, request)


def _sizes(log: AllocationLog, samples: int = 4) -> list[int]:
    storages = log.storages
    return [
        fixed + each * samples
        for fixed, each in zip(storages.fixed_bytes, storages.bytes_per_sample, strict=True)
    ]


def _live(log: AllocationLog) -> list[int]:
    """Return the live bytes after each event."""
    sizes = _sizes(log)
    signs = {int(Event.ALLOCATE): 1, int(Event.FREE): -1}
    pairs = zip(log.codes, log.arguments, strict=True)
    return list(accumulate(signs[code] * sizes[argument] if code in signs else 0 for code, argument in pairs))


def _bytes_of(log: AllocationLog, kind: TensorKind) -> int:
    pairs = zip(log.storages.kinds, _sizes(log), strict=True)
    return sum(size for of, size in pairs if of is kind)


def _left(log: AllocationLog) -> dict[str, int]:
    """Return the bytes that outlive the log, by kind."""
    sizes, live = _sizes(log), set[int]()
    for code, argument in zip(log.codes, log.arguments, strict=True):
        if code == Event.ALLOCATE:
            live.add(argument)
        elif code == Event.FREE:
            live.remove(argument)
    found: dict[str, int] = {}
    for storage in live:
        if sizes[storage]:
            name = log.storages.kinds[storage].value
            found[name] = found.get(name, 0) + sizes[storage]
    return found


def test_gathered_weights_are_freed_by_resizing_and_gradients_stay_as_shards() -> None:
    log = _log("llama", _request(keeps_outputs=False))
    shards = sum(shard.num_elements * shard.bytes_per_element for shard in log.shards)
    assert _left(log) == {"gradients": shards}


def test_each_unit_is_gathered_in_forward_and_backward_but_the_tail() -> None:
    whole = sum(p.num_elements * p.bytes_per_element for p in _log("llama", _request()).parameters)
    resharded, kept = (
        _bytes_of(_log("llama", _request(replace(_TWO, reshard_after_forward=on))), TensorKind.GATHERED)
        for on in (True, False)
    )
    assert kept == pytest.approx(whole, rel=0.05)  # padding
    assert whole < resharded < 2 * kept


@pytest.mark.parametrize(
    "num_ranks", [3, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 64))]
)
def test_rank_0_holds_its_share_of_each_weight_rounded_up(num_ranks: int) -> None:
    log = _log("llama", _request(Sharding(shard_size=num_ranks)))
    for parameter, shard in zip(log.parameters, log.shards, strict=True):
        rows, *others = parameter.shape
        assert shard.shape == (-(-rows // num_ranks), *others)


def test_units_are_the_embeddings_each_block_and_the_head_with_the_last_norm() -> None:
    log = _log("llama", _request())
    units: dict[int, set[str]] = {}
    for parameter, shard in zip(log.parameters, log.shards, strict=True):
        units.setdefault(shard.unit, set()).add(".".join(parameter.name.split(".")[:3]))
    assert sorted(sorted(names) for names in units.values()) == [
        ["lm_head.weight", "model.norm.weight"],
        ["model.embed_tokens.weight"],
        ["model.layers.0"],
        ["model.layers.1"],
    ]


@pytest.mark.parametrize(
    "name",
    [
        "roberta",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "gpt2", "vit", "falcon")),
    ],
)
def test_families_whose_embeddings_are_no_unit_are_sharded(name: str) -> None:
    log = _log(name, _request())
    assert all(shard.unit >= 0 for shard in log.shards)


def test_masters_are_fp32_and_compute_is_16_bit() -> None:
    log = _log("llama", _request(replace(_TWO, precision=Precision.BF16), weights=Precision.BF16))
    assert {shard.bytes_per_element for shard in log.shards} == {4}
    fp32 = _bytes_of(_log("llama", _request()), TensorKind.GATHERED)
    assert _bytes_of(log, TensorKind.GATHERED) == fp32 // 2


def test_accumulation_without_sync_holds_whole_gradients() -> None:
    once, unsynced, synced = (
        max(_live(_log("llama", _request(replace(_TWO, **more)))))
        for more in ({}, {"micro_batches": 3}, {"micro_batches": 3, "syncs_each_batch": True})
    )
    assert once < synced < unsynced


def test_offloaded_shards_are_copied_to_the_gpu_and_leave_no_gradients_there() -> None:
    offloaded = _log("llama", _request(replace(_TWO, cpu_offload=True), keeps_outputs=False))
    assert _left(offloaded) == {}
    assert _bytes_of(offloaded, TensorKind.GATHER_BUFFER) > _bytes_of(
        _log("llama", _request(keeps_outputs=False)), TensorKind.GATHER_BUFFER
    )


@pytest.mark.parametrize("stored_in", [pytest.param(None, marks=pytest.mark.slow), Precision.BF16])
def test_nf4_is_sharded_if_its_storage_is_a_floating_type(stored_in: Precision | None) -> None:
    request = _request(
        replace(_TWO, precision=Precision.BF16),
        weights=Precision.BF16,
        lora=Lora(rank=4),
        quantization=Quantization.NF4,
        packing=Packing(stored_in=stored_in),
    )
    log = _log("llama", request)
    packed = [shard for p, shard in zip(log.parameters, log.shards, strict=True) if p.is_packed]
    assert packed
    assert {shard.unit >= 0 for shard in packed} == {stored_in is not None}


@pytest.mark.parametrize("name", ["t5", "bart", "bert"])
def test_a_model_whose_tied_weights_would_be_trained_apart_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="fsdp2-unties-weights"):
        _log(name, _request())


def test_a_full_state_dict_gathers_tensor_by_tensor() -> None:
    save = _log("llama", _request()).save
    live = list(accumulate(save.sizes[abs(e) - 1] * (1 if e > 0 else -1) for e in save.entries))
    assert live[-1] == 0
    assert max(live) <= 2 * max(save.sizes)


_SOME = [
    ("llama", _request()),
    ("gpt2", _request(replace(_TWO, precision=Precision.BF16, micro_batches=2))),
]
_REST = [
    ("llama", _request(replace(_TWO, reshard_after_forward=False))),
    ("llama", _request(replace(_TWO, precision=Precision.BF16), gradient_checkpointing=True)),
    ("llama", _request(replace(_TWO, precision=Precision.BF16, copies=2, micro_batches=3))),
    ("llama", _request(replace(_TWO, precision=Precision.BF16, cpu_offload=True))),
    ("llama", _request(replace(_TWO, micro_batches=3, syncs_each_batch=True), keeps_outputs=False)),
    ("llama", _request(replace(_TWO, precision=Precision.BF16), weights=Precision.BF16, lora=Lora(rank=4))),
    ("bert", _request(replace(_TWO, precision=Precision.BF16))),
    ("mixtral", _request(Sharding(shard_size=8))),
]


def _check_replicated(name: str, request: TraceRequest) -> None:
    config, build = tiny(name, _LAYERS)
    said: list[str] = []
    short = trace_config(config, build, request, on_progress=said.append)
    assert f"of {_LAYERS} layers" in said[-1], "it fell back to all layers"
    assert short == trace_config(config, build, request, all_layers=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "request_"), [*_SOME, *_REST])
def test_few_layers_say_what_all_layers_do(name: str, request_: TraceRequest) -> None:
    _check_replicated(name, request_)


def test_a_process_in_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="trace-in-process-group"):
        _log.__wrapped__("llama", _request())


def test_a_group_of_one_process_is_set_aside() -> None:
    import torch
    import torch.distributed as dist

    from zerofit.core.upstream.fake_ranks import fake_ranks

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        own, other = dist.group.WORLD, dist.new_group([0])
        with fake_ranks(2, 4) as mesh:
            assert (mesh.size(), dist.get_world_size()) == (8, 8)
        assert (dist.group.WORLD, dist.get_world_size(), dist.get_backend()) == (own, 1, "gloo")
        value = torch.ones(1)
        dist.all_reduce(value, group=other)
        assert value.item() == 1
    finally:
        dist.destroy_process_group()
