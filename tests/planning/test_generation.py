"""Which layout and batch generation gets on which machine, under which flags, and the laws of its memory."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from planning_problems import spec_of

from zerofit.checking.rule import ACCELERATE
from zerofit.core.allocation_log import TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.estimates import Holder, RunPhase
from zerofit.core.facts import GpuSpec, Machine, Versions
from zerofit.core.plan import Origin
from zerofit.core.strategy import DTYPES, Engine, OffloadDevice, Precision, ZeroStage
from zerofit.core.units import GIB
from zerofit.generation.generation_job import Gather
from zerofit.models.find import probe_model
from zerofit.models.trace.generation import GenerateCall, GenerationTrace, trace_generation
from zerofit.planning.estimate.generation import GATHERED_ONCE
from zerofit.planning.generation import (
    BATCH_SIZES,
    GenerationPlan,
    GenerationProblem,
    check_spec,
    generation_table,
    layout_words,
    plan_generation,
)

if TYPE_CHECKING:
    from zerofit.core.facts import ModelFacts

_VERSIONS = Versions(python="3.12.4", zerofit="0.1.0", torch="2.13.0", deepspeed="0.19.8")
_GPU_24 = GpuSpec(name="NVIDIA GeForce RTX 4090", memory_bytes=24 * GIB, compute_capability=(8, 9))
_GPU_80 = GpuSpec(
    name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * GIB, compute_capability=(8, 0), has_fast_links=True
)
_CALL = {"prompt_length": 1024, "max_new_tokens": 512}


def _machine(*gpus: GpuSpec, host_gib: int = 64, nvme_gib: int = 0) -> Machine:
    """Return a node whose host memory is all free."""
    return Machine(
        gpus=gpus,
        num_cpu_cores=8,
        host_memory_bytes=host_gib * GIB,
        host_memory_available_bytes=host_gib * GIB,
        nvme_bytes=nvme_gib * GIB,
    )


@cache
def _facts(name: str) -> ModelFacts:
    return probe_model(name, is_fast=True).facts


@cache
def _trace(name: str, precision: Precision, call: GenerateCall) -> GenerationTrace:
    request = TraceRequest(sequence_length=call.prompt_length, weights=precision)
    return trace_generation(probe_model(name), call, request, cache_folder=None)


def _plan(
    name: str,
    node: Machine,
    *,
    num_prompts: int = 100,
    gather: Gather = Gather.AUTO,
    call: dict[str, Any] | None = None,
    **request: Any,
) -> GenerationPlan:
    precision = request.get("precision") or DTYPES.get(_facts(name).checkpoint_dtype, Precision.FP32)
    made = GenerateCall(**{**_CALL, **(call or {})})
    problem = GenerationProblem(
        model=_facts(name),
        call=made,
        trace=_trace(name, precision, made),
        precision=precision,
        machine=node,
        versions=_VERSIONS,
        spec=spec_of(**request),
        num_prompts=num_prompts,
        gather=gather,
    )
    return plan_generation(problem)


def _layout(found: GenerationPlan) -> str:
    chosen = found.chosen
    assert found.fits, chosen.shortage
    return f"{layout_words(chosen.strategy, chosen.topology)}, batch {chosen.batch_size}"


_CPU = _machine(host_gib=32)
_ONE_24 = _machine(_GPU_24)
_TWO_80 = _machine(_GPU_80, _GPU_80, host_gib=256)
_EIGHT_80 = _machine(*(_GPU_80,) * 8, host_gib=1024)

_CHOICES: list[tuple[str, Machine, dict[str, Any], str]] = [
    # What fits whole stays whole, on as many GPUs as there are prompts.
    ("llama-3-8b", _ONE_24, {}, "whole model on one GPU, batch 16"),
    ("llama-3-8b", _EIGHT_80, {}, "whole model on each of 8 GPUs, batch 13"),
    ("llama-3-8b", _EIGHT_80, {"num_prompts": 1}, "whole model on one GPU, batch 1"),
    ("llama-3-8b", _EIGHT_80, {"num_prompts": 3}, "whole model on each of 3 GPUs, batch 1"),
    ("llama-3-8b", _EIGHT_80, {"num_prompts": 999}, "whole model on each of 8 GPUs, batch 32"),
    ("llama-3-8b", _EIGHT_80, {"num_nodes": 2}, "whole model on each of 16 GPUs of 2 nodes, batch 7"),
    ("llama-3-8b", _EIGHT_80, {"num_processes": 2}, "whole model on each of 2 GPUs, batch 32"),
    # What does not is partitioned over all GPUs, however few the prompts are.
    ("llama-3-70b", _EIGHT_80, {}, "ZeRO-3 over 8 GPUs, batch 13"),
    ("llama-3-70b", _EIGHT_80, {"num_prompts": 1}, "ZeRO-3 over 8 GPUs, batch 1"),
    ("llama-3-70b", _TWO_80, {"num_nodes": 2}, "ZeRO-3 over 4 GPUs of 2 nodes, batch 25"),
    # And what does not fit so has its weights on the host.
    (
        "llama-3-70b",
        _machine(_GPU_24, host_gib=256),
        {},
        "ZeRO-3 on one GPU, weights in host memory, batch 16",
    ),
    (
        "llama-3-70b",
        _machine(_GPU_24, host_gib=48),
        {"nvme_path": "/nvme"},
        "ZeRO-3 on one GPU, weights on NVMe, batch 16",
    ),
    # On the CPU one process has the whole model; more only as asked.
    ("llama-3-8b", _CPU, {}, "whole model on the CPU, batch 32"),
    ("llama-3-8b", _EIGHT_80, {"on_cpu": True}, "whole model on the CPU, batch 32"),
    ("gpt2", _EIGHT_80, {"on_cpu": True}, "whole model on the CPU, batch 32"),
    # What a flag says is kept.
    ("llama-3-8b", _ONE_24, {"micro_batch_size": 3}, "whole model on one GPU, batch 3"),
    ("llama-3-8b", _TWO_80, {"zero_stage": ZeroStage.PARAMETERS}, "ZeRO-3 over 2 GPUs, batch 32"),
    (
        "llama-3-8b",
        _ONE_24,
        {"param_offload": OffloadDevice.CPU},
        "ZeRO-3 on one GPU, weights in host memory, batch 32",
    ),
    (
        "gpt2",
        _CPU,
        {"zero_stage": ZeroStage.PARAMETERS, "num_processes": 2},
        "ZeRO-3 over 2 ranks on the CPU, batch 32",
    ),
]


@pytest.mark.parametrize(
    ("name", "node", "request_", "expected"),
    # Models that other tests here trace, too, are traced at each change.
    [pytest.param(*case, marks=pytest.mark.slow if case[0] == "gpt2" else ()) for case in _CHOICES],
)
def test_the_first_layout_that_fits_is_chosen(
    name: str, node: Machine, request_: dict[str, Any], expected: str
) -> None:
    call = {"prompt_length": 64, "max_new_tokens": 32} if name == "gpt2" else {}
    assert _layout(_plan(name, node, call=call, **request_)) == expected


@pytest.mark.slow
def test_more_beams_leave_room_for_fewer_prompts() -> None:
    sizes = [_plan("llama-3-8b", _ONE_24, call={"num_beams": beams}).chosen.batch_size for beams in (1, 4)]
    assert sizes[0] > sizes[1]


@pytest.mark.parametrize(
    ("name", "node", "request_", "lacks"),
    [
        ("llama-3-70b", _ONE_24, {}, "of host memory"),
        pytest.param(
            "llama-3-8b",
            _ONE_24,
            {"precision": Precision.FP32, "zero_stage": ZeroStage.NOTHING},
            "on each GPU",
            marks=pytest.mark.slow,  # traced for it alone
        ),
        ("llama-3-8b", _machine(host_gib=8), {}, "of host memory"),
        (
            "llama-3-70b",
            _machine(_GPU_24, host_gib=48, nvme_gib=100),
            {"nvme_path": "/nvme", "param_offload": OffloadDevice.NVME},
            "of 100.0 GiB on the NVMe disk",
        ),
    ],
)
def test_where_nothing_fits_the_last_layout_says_what_it_lacks(
    name: str, node: Machine, request_: dict[str, Any], lacks: str
) -> None:
    found = _plan(name, node, **request_)
    assert not found.fits
    assert found.chosen.shortage.endswith(lacks)
    assert found.chosen.batch_size == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", [ZeroStage.NOTHING, ZeroStage.PARAMETERS])
def test_more_is_never_less(stage: ZeroStage) -> None:
    def peak(**changes: Any) -> int:
        asked = {"micro_batch_size": 4, "zero_stage": stage, "num_processes": 8, **changes}
        call = {"prompt_length": 64, "max_new_tokens": 32, **asked.pop("call", {})}
        device = _plan("gpt2", _EIGHT_80, call=call, **asked).chosen.device
        assert device is not None
        return device.peak_bytes

    batches = [peak(micro_batch_size=size) for size in sorted(BATCH_SIZES)]
    assert batches == sorted(batches)
    for field, numbers in {"prompt_length": (16, 64), "max_new_tokens": (1, 32), "num_beams": (1, 2)}.items():
        grown = [peak(call={field: number}) for number in numbers]
        assert grown == sorted(grown)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b"])
def test_a_whole_model_is_its_parameters(name: str) -> None:
    trace = _trace(name, Precision.BF16, GenerateCall(**_CALL))
    parameters = trace.prefill.logs[0].parameters
    assert sum(parameter.num_elements for parameter in parameters) == _facts(name).num_parameters


def test_zero3_holds_a_part_of_the_weights_and_what_it_gathers() -> None:
    node = _machine(*(_GPU_80,) * 8, host_gib=1024)
    device = _plan("llama-3-8b", node, zero_stage=ZeroStage.PARAMETERS).chosen.device
    assert device is not None
    held = {term.name: term.num_bytes for term in device.phases[-1].terms}
    whole = 2 * _facts("llama-3-8b").num_parameters
    assert held["weights"] == pytest.approx(whole / 8, rel=0.01)
    assert 0 < held["gathered weights"] < whole


def test_gathered_once_holds_the_whole_model_beside_the_parts() -> None:
    found = _plan("llama-3-8b", _EIGHT_80, gather=Gather.ALWAYS, zero_stage=ZeroStage.PARAMETERS)
    assert found.chosen.device is not None
    held = {term.name: term.num_bytes for term in found.chosen.device.phases[-1].terms}
    assert held[GATHERED_ONCE] == 2 * _facts("llama-3-8b").num_parameters


def test_each_phase_is_the_sum_of_its_terms() -> None:
    device = _plan("llama-3-70b", _EIGHT_80).chosen.device
    assert device is not None
    assert [phase.phase for phase in device.phases] == [RunPhase.LOAD, RunPhase.PREFILL, RunPhase.DECODE]
    for phase in device.phases:
        assert phase.total_bytes == sum(term.num_bytes for term in phase.terms)
        assert all(term.num_bytes >= 0 and term.formula and term.source for term in phase.terms)
    (rest,) = (term for term in device.peak.terms if term.holder is Holder.CACHE)
    assert rest.source.startswith("ASSUMPTION")


def test_the_launcher_gets_the_same_layout_without_training() -> None:
    found = _plan("llama-3-70b", _EIGHT_80, micro_batch_size=4)
    launched = found.as_plan()
    assert not launched.trains
    assert launched.strategy.engine is Engine.DEEPSPEED
    assert [other.strategy.zero_stage for other in launched.rejected] == [ZeroStage.NOTHING]
    assert [(reason.field, reason.value, reason.origin) for reason in launched.reasons] == [
        ("zero_stage", "3", Origin.PLANNER),
        ("param_offload", "none", Origin.PLANNER),
        ("precision", "bf16", Origin.PLANNER),
        ("micro_batch_size", "4", Origin.FLAG),
        ("world_size", "8", Origin.PLANNER),
    ]


def test_a_model_that_was_not_traced_runs_as_its_flags_say() -> None:
    problem = GenerationProblem(
        model=_facts("llama-3-8b"),
        call=GenerateCall(**_CALL),
        trace=None,
        precision=Precision.BF16,
        machine=_TWO_80,
        versions=_VERSIONS,
        spec=spec_of(zero_stage=ZeroStage.PARAMETERS, micro_batch_size=4),
        num_prompts=100,
    )
    found = plan_generation(problem)
    assert _layout(found) == "ZeRO-3 over 2 GPUs, batch 4"
    assert found.as_plan().estimate is None
    assert "not estimated" in generation_table(found)


_TABLE = """\
llama-3-70b: LlamaForCausalLM, 70.55 B parameters, bf16, on 8 x NVIDIA A100-SXM4-80GB
100 prompts of at most 1024 tokens, at most 512 new ones

   layout                         batch  GPU GiB     host GiB   verdict
   whole model on each of 8 GPUs  1      133.3 ±10%  12.0 ±15%  needs 133.3 GiB of 76.0 GiB on each GPU
>  ZeRO-3 over 8 GPUs             13     30.6 ±10%   12.0 ±15%  fits

GPU, most in decode: weights 16.4, key-value cache 6.1, allocator cache 3.0, gathered weights 2.0, \
all-gather buffer 2.0, NCCL 0.7, CUDA context 0.5 GiB
host, most in load: Python and libraries 12.0 GiB"""


def test_the_table_shows_what_was_tried() -> None:
    assert generation_table(_plan("llama-3-70b", _EIGHT_80)) == _TABLE


_REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"zero_stage": ZeroStage.GRADIENTS},
        "error[generate-stage-pointless]: ZeRO stage 2 partitions nothing that generation has\n"
        "  found: --zero-stage 2\n"
        "  why:   stages 1 and 2 partition optimizer states and gradients; each rank would hold the whole"
        " model, as with stage 0\n"
        "  fix:   give --zero-stage 0 for the whole model on each rank, 3 for a part of it, or leave it out\n"
        "  see:   https://www.deepspeed.ai/tutorials/zero/#zero-overview",
    ),
    (
        {"zero_stage": ZeroStage.NOTHING, "gather": Gather.ALWAYS},
        "error[generate-gather-needs-zero3]: there are no weights to gather\n"
        "  found: --gather always with --zero-stage 0\n"
        "  why:   each rank holds the whole model already\n"
        "  fix:   leave out --gather",
    ),
    (
        {"num_processes": 3, "num_nodes": 2},
        "error[num-processes-is-for-all-machines]: the ranks do not divide over the nodes\n"
        "  found: --num-processes 3 with --num-machines 2\n"
        "  why:   --num-processes counts the ranks of all nodes together, and each node gets as many\n"
        "  fix:   set --num-processes to a multiple of 2\n"
        f"  see:   {ACCELERATE}/utils/launch.py",
    ),
]


def _check(gather: Gather = Gather.AUTO, **request: Any) -> None:
    check_spec(spec_of(**request), machine=_TWO_80, versions=_VERSIONS, gather=gather)


@pytest.mark.parametrize(("flags", "expected"), _REFUSED)
def test_flags_that_contradict(flags: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        _check(**flags)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("flags", "rule", "found"),
    [
        (
            {"zero_stage": ZeroStage.NOTHING, "param_offload": OffloadDevice.CPU},
            "param-offload-needs-zero3",
            "--offload-param cpu with --zero-stage 0",
        ),
        (
            {"param_offload": OffloadDevice.NVME},
            "nvme-needs-path",
            "--offload-param nvme with no --nvme-path",
        ),
        (
            {"param_offload": OffloadDevice.CPU, "nvme_path": "/nvme"},
            "nvme-path-unused",
            "--nvme-path /nvme without an offload to nvme",
        ),
    ],
)
def test_flags_that_break_a_rule(flags: dict[str, Any], rule: str, found: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        _check(**flags)
    assert [(error.rule, error.found) for error in caught.value.exceptions] == [(rule, found)]


@pytest.mark.parametrize(
    "flags",
    [
        {"zero_stage": ZeroStage.PARAMETERS, "param_offload": OffloadDevice.CPU},
        {"num_processes": 4, "on_cpu": True},
        {"num_processes": 4, "num_nodes": 2},
        {"nvme_path": "/nvme"},
    ],
)
def test_flags_that_go_together(flags: dict[str, Any]) -> None:
    _check(**flags)
