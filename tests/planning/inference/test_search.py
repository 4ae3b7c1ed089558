"""Which layout, ranks and batch are chosen on which machine, under which flags, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from inference_facts import GPU_24, GPU_80, facts, machine, plan, weights, workload

from zerofit.core.plan import Origin
from zerofit.core.strategy import Engine, OffloadDevice, Precision, ZeroStage
from zerofit.generation.generation_job import Gather
from zerofit.planning.inference.activations import cache_bytes_per_token
from zerofit.planning.inference.estimator import MAX_BATCH, batch_sizes, seconds_of
from zerofit.planning.inference.memory import Weights
from zerofit.planning.inference.problem import InferencePlan, layout_words

_CPU = machine(host_gib=32)
_ONE_24 = machine(GPU_24, host_gib=64)
_ONE_80 = machine(GPU_80, host_gib=64)
_TWO_UNKNOWN = machine(*(replace(GPU_80, peer_bytes_per_s=None),) * 2, host_gib=256)
_TWO_80 = machine(GPU_80, GPU_80, host_gib=256)
_EIGHT_80 = machine(*(GPU_80,) * 8, host_gib=1024)
_SMALL_HOST = machine(GPU_24, host_gib=48)


def _layout(found: InferencePlan) -> str:
    assert found.fits
    return f"{layout_words(found.strategy, found.topology)}, batch {found.batch_size}"


_CHOICES: list[tuple[str, Any, dict[str, int], dict[str, Any], str]] = [
    # What fits whole stays whole, on as many GPUs as there are prompts.
    ("llama-3-8b", _ONE_24, {}, {}, "whole model on one GPU, batch 15"),
    ("llama-3-8b", _EIGHT_80, {}, {}, "whole model on each of 8 GPUs, batch 13"),
    ("llama-3-8b", _EIGHT_80, {"num_prompts": 1}, {}, "whole model on one GPU, batch 1"),
    ("llama-3-8b", _EIGHT_80, {"num_prompts": 3}, {}, "whole model on each of 3 GPUs, batch 1"),
    ("llama-3-8b", _EIGHT_80, {"num_prompts": 999}, {}, f"whole model on each of 8 GPUs, batch {MAX_BATCH}"),
    ("llama-3-8b", _EIGHT_80, {}, {"num_nodes": 2}, "whole model on each of 16 GPUs of 2 nodes, batch 7"),
    ("llama-3-8b", _EIGHT_80, {}, {"num_processes": 2}, "whole model on each of 2 GPUs, batch 25"),
    # What does not is partitioned over all GPUs, however few the prompts are.
    ("llama-3-70b", _EIGHT_80, {}, {}, "ZeRO-3 over 8 GPUs, batch 13"),
    ("llama-3-70b", _EIGHT_80, {"num_prompts": 1}, {}, "ZeRO-3 over 8 GPUs, batch 1"),
    # But where a pass moves all weights, more prompts in a call take less time: one call, not 50.
    ("llama-3-70b", _TWO_80, {}, {}, "ZeRO-3 over 2 GPUs, weights in host memory, batch 50"),
    ("llama-3-70b", _TWO_80, {"num_prompts": 2}, {}, "ZeRO-3 over 2 GPUs, batch 1"),
    ("llama-3-70b", _TWO_UNKNOWN, {}, {}, "ZeRO-3 over 2 GPUs, batch 1"),
    ("llama-3-70b", _EIGHT_80, {"num_prompts": 512}, {}, "ZeRO-3 over 8 GPUs, batch 64"),
    ("llama-3-70b", _TWO_80, {}, {"num_nodes": 2}, "ZeRO-3 over 4 GPUs of 2 nodes, batch 25"),
    ("llama-2-13b", _ONE_24, {}, {}, "ZeRO-3 on one GPU, weights in host memory, batch 8"),
    (
        "llama-3-70b",
        _SMALL_HOST,
        {},
        {"nvme_path": "/nvme"},
        "ZeRO-3 on one GPU, weights on NVMe, batch 15",
    ),
    # Attention that computes all scores needs far more for each prompt.
    ("gemma-2-9b", _ONE_80, {"longest_prompt": 4096}, {}, "whole model on one GPU, batch 8"),
    ("bloom-7b1", _ONE_80, {"longest_prompt": 4096}, {}, "whole model on one GPU, batch 4"),
    ("falcon-7b", _ONE_24, {}, {}, "whole model on one GPU, batch 8"),
    # Gathered once, a model leaves as much room as whole.
    (
        "llama-3-8b",
        _ONE_24,
        {},
        {"param_offload": OffloadDevice.CPU, "gather": Gather.ALWAYS},
        "ZeRO-3 on one GPU, weights in host memory, batch 15",
    ),
    # On the CPU one process has the whole model; more only as asked.
    ("llama-3-8b", _CPU, {}, {}, "whole model on the CPU, batch 25"),
    (
        "gpt2",
        _CPU,
        {"longest_prompt": 512},
        {"num_processes": 2},
        "whole model on each of 2 ranks on the CPU, batch 25",
    ),
    ("gpt2", _EIGHT_80, {"longest_prompt": 512}, {"on_cpu": True}, "whole model on the CPU, batch 25"),
    # What a flag says is kept.
    ("llama-3-8b", _ONE_24, {}, {"micro_batch_size": 3}, "whole model on one GPU, batch 3"),
    ("llama-3-8b", _TWO_80, {}, {"zero_stage": ZeroStage.PARAMETERS}, "ZeRO-3 over 2 GPUs, batch 50"),
    (
        "llama-3-8b",
        _ONE_24,
        {},
        {"param_offload": OffloadDevice.CPU},
        "ZeRO-3 on one GPU, weights in host memory, batch 50",
    ),
    (
        "gpt2",
        _CPU,
        {"longest_prompt": 512},
        {"zero_stage": ZeroStage.PARAMETERS, "num_processes": 2},
        "ZeRO-3 over 2 ranks on the CPU, batch 25",
    ),
    (
        "gpt2",
        _CPU,
        {"longest_prompt": 512},
        {"param_offload": OffloadDevice.CPU, "num_processes": 2},
        "ZeRO-3 over 2 ranks on the CPU, weights in host memory, batch 25",
    ),
]


@pytest.mark.parametrize(("name", "node", "work", "request_", "expected"), _CHOICES)
def test_the_first_layout_that_fits_is_chosen(
    name: str, node: Any, work: dict[str, int], request_: dict[str, Any], expected: str
) -> None:
    assert _layout(plan(name, node, work=workload(**work), **request_)) == expected


@pytest.mark.parametrize(
    ("num_prompts", "num_ranks", "most", "expected"),
    [
        (1, 1, None, [1]),
        (0, 4, None, [1]),
        (13, 1, None, [13, 7, 4, 2, 1]),
        (16, 1, None, [16, 8, 4, 2, 1]),
        (16, 5, None, [4, 2, 1]),
        (33, 1, 32, [17, 11, 7, 4, 2, 1]),
        (1000, 2, 32, [32, 16, 8, 4, 2, 1]),
        (1000, 2, None, [500, 250, 125, 63, 32, 16, 8, 4, 2, 1]),
    ],
)
def test_batches_are_tried_from_all_that_a_rank_has_in_even_calls(
    num_prompts: int, num_ranks: int, most: int | None, expected: list[int]
) -> None:
    assert list(batch_sizes(num_prompts, num_ranks, most=most)) == expected


def test_of_layouts_that_fit_the_one_with_the_least_time_runs() -> None:
    """50 calls of 512 passes gather half the model from the peer; with offload, a half from the host too."""
    found = plan("llama-3-70b", _TWO_80)
    reason = next(one.why for one in found.reasons if one.field == "zero_stage")
    assert reason == "ZeRO-3 over 2 GPUs with batch 1 takes about 2.2 h, as computed"
    times = {
        layout_words(one.strategy, one.topology): one.seconds
        for one in (found.chosen, *(other for other, _ in found.others))
    }
    half, whole = 70.55e9, 141.1e9
    gathered, read = half / 300e9, whole / 2039e9
    assert times["ZeRO-3 over 2 GPUs"] == pytest.approx(50 * 512 * (gathered + read), rel=0.02)
    offloaded = 512 * (half / 31.5e9 + gathered + read)
    assert times["ZeRO-3 over 2 GPUs, weights in host memory"] == pytest.approx(offloaded, rel=0.02)


def test_more_beams_leave_room_for_fewer_prompts() -> None:
    sizes = [plan("llama-3-8b", _ONE_24, work=workload(num_beams=beams)).batch_size for beams in (1, 4, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


@pytest.mark.parametrize(
    ("name", "said", "dtype"),
    [
        ("llama-3-8b", None, "bfloat16"),
        ("t5-base", None, "float32"),
        ("llama-3-8b", Precision.FP16, "float16"),
        ("t5-base", Precision.BF16, "bfloat16"),
    ],
)
def test_weights_have_the_checkpoints_type_unless_a_flag_says_another(
    name: str, said: Precision | None, dtype: str
) -> None:
    assert plan(name, _EIGHT_80, precision=said).dtype == dtype


def test_every_value_has_its_reason() -> None:
    found = plan("llama-3-70b", _EIGHT_80, micro_batch_size=4)
    assert [(one.field, one.value, one.origin, one.why) for one in found.reasons] == [
        (
            "zero_stage",
            "3",
            Origin.PLANNER,
            "whole model on each of 8 GPUs needs 135.4 GiB of 76.0 GiB on each GPU",
        ),
        ("world_size", "8", Origin.PLANNER, "every GPU holds a part of the model"),
        ("precision", "bf16", Origin.PLANNER, "the checkpoint's"),
        ("micro_batch_size", "4", Origin.FLAG, "--batch-size says so"),
    ]


def test_every_other_layout_says_why_it_lost() -> None:
    found = plan("llama-3-8b", _TWO_80)
    assert [(layout_words(one.strategy, one.topology), why) for one, why in found.others] == [
        ("ZeRO-3 over 2 GPUs", "fits; gathers every layer from all ranks for each token: about 20 s"),
        (
            "ZeRO-3 over 2 GPUs, weights in host memory",
            "fits; copies every layer from host memory for each token: about 3 min",
        ),
        ("ZeRO-3 over 2 GPUs, weights on NVMe", "needs --nvme-path, a folder on an NVMe disk"),
    ]


@pytest.mark.parametrize(
    ("name", "node", "request_", "lacks", "suggestions"),
    [
        (
            "llama-3-70b",
            _ONE_24,
            {},
            "needs 150.3 GiB of 64.0 GiB of host memory",
            (
                "--nvme-path with a folder on a local NVMe disk",
                "8 x NVIDIA GeForce RTX 4090",
                "256.0 GiB of host memory on each node",
            ),
        ),
        (
            "llama-3-8b",
            _ONE_24,
            {"precision": Precision.FP32, "zero_stage": ZeroStage.NOTHING},
            "needs 31.0 GiB of 22.8 GiB on each GPU",
            ("leave out --zero-stage", "--dtype bfloat16", "--cpu, far slower"),
        ),
        (
            "llama-3-70b",
            machine(*(GPU_80,) * 8, host_gib=64),
            {"on_cpu": True},
            "needs 132.8 GiB of 64.0 GiB of host memory",
            (
                "leave out --cpu",
                "--nvme-path with a folder on a local NVMe disk",
                "256.0 GiB of host memory on each node",
            ),
        ),
        (
            "llama-2-13b",
            _ONE_24,
            {"param_offload": OffloadDevice.CPU, "gather": Gather.ALWAYS},
            "needs 26.3 GiB of 22.8 GiB on each GPU",
            ("leave out --gather",),
        ),
        (
            "llama-3-8b",
            machine(host_gib=8),
            {},
            "needs 16.1 GiB of 8.0 GiB of host memory",
            ("32.0 GiB of host memory on each node",),
        ),
    ],
)
def test_where_nothing_fits_the_nearest_and_what_would_help_are_named(
    name: str, node: Any, request_: dict[str, Any], lacks: str, suggestions: tuple[str, ...]
) -> None:
    found = plan(name, node, **request_)
    assert not found.fits
    assert (found.chosen.shortage, found.suggestions) == (lacks, suggestions)


def test_a_full_disk_is_no_place_for_weights() -> None:
    node = machine(GPU_24, host_gib=48, nvme_gib=100)
    found = plan("llama-3-70b", node, nvme_path="/nvme", param_offload=OffloadDevice.NVME)
    assert found.chosen.shortage == "needs 131.4 GiB of 100.0 GiB on the NVMe disk"
    assert found.chosen.excess == pytest.approx(1.314, abs=1e-3)


def test_buffers_for_nvme_hold_the_largest_part() -> None:
    """DeepSpeed ends a run whose shard is larger: "More elements than buffer size"."""
    node = machine(GPU_24, host_gib=48)
    found = plan("llama-3-70b", node, nvme_path="/nvme")
    assert found.chosen.nvme_buffer_elements == facts("llama-3-70b").largest_parameter


def test_the_launcher_gets_the_same_layout_without_training() -> None:
    found = plan("llama-3-70b", _EIGHT_80)
    launched = found.as_plan()
    assert not launched.trains
    assert (launched.strategy, launched.topology) == (found.strategy, found.topology)
    assert launched.strategy.engine is Engine.DEEPSPEED
    assert [one.strategy for one in launched.rejected] == [one.strategy for one, _ in found.others]


_MODEL = facts("llama-3-8b")
_BYTES = 2 * _MODEL.num_parameters
_PASSES, _TOKENS = 512, 1024 + 256


def _seconds(held: Weights, *, num_prompts: int, batch_size: int) -> float | None:
    node = replace(machine(GPU_80), nvme_read_bytes_per_s=5e9)
    return seconds_of(
        held, workload(num_prompts=num_prompts), batch_size=batch_size, machine=node, gpu=GPU_80
    )


def _read_s(held: Weights, batch_size: int) -> float:
    return (_BYTES + batch_size * _TOKENS * cache_bytes_per_token(held.shape)) / 2039e9


def test_a_whole_model_is_read_for_each_pass() -> None:
    held = weights(_MODEL)
    assert _seconds(held, num_prompts=100, batch_size=25) == pytest.approx(4 * _PASSES * _read_s(held, 25))


def test_parts_come_from_the_peers_for_each_pass_or_once_for_a_call() -> None:
    held = weights(_MODEL, ranks=8, stage=3)
    moved = _BYTES * 7 / 8 / 300e9
    found = _seconds(held, num_prompts=160, batch_size=10)
    assert found == pytest.approx(2 * _PASSES * (_read_s(held, 10) + moved))
    once = weights(_MODEL, ranks=8, stage=3, gather=Gather.ALWAYS)
    found = _seconds(once, num_prompts=160, batch_size=10)
    assert found == pytest.approx(2 * (_PASSES * _read_s(held, 10) + moved))


@pytest.mark.parametrize(
    ("offload", "moved"),
    [(OffloadDevice.CPU, _BYTES / 31.5e9), (OffloadDevice.NVME, _BYTES / 31.5e9 + _BYTES / 5e9)],
)
def test_offloaded_weights_come_over_the_hosts_link(offload: OffloadDevice, moved: float) -> None:
    held = weights(_MODEL, stage=3, offload=offload)
    found = _seconds(held, num_prompts=10, batch_size=10)
    assert found == pytest.approx(_PASSES * (_read_s(held, 10) + moved))


def test_the_cpu_has_no_rates_that_are_known() -> None:
    held = weights(_MODEL, on_cpu=True)
    assert seconds_of(held, workload(), batch_size=1, machine=machine(), gpu=None) is None
