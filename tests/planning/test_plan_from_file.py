"""choose from a plan file: what is kept, what flags change, and what is chosen anew on another machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec, Machine, Versions, Workload
from zerofit.core.plan import Origin, Plan, Topology
from zerofit.core.request import Request
from zerofit.core.strategy import Engine, Lora, OffloadDevice, Precision, Quantization, Strategy, ZeroStage
from zerofit.core.units import GIB
from zerofit.planning.plan_from_flags import choose

_H100 = GpuSpec(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB, compute_capability=(9, 0))
_V100 = GpuSpec(name="Tesla V100-SXM2-32GB", memory_bytes=32 * GIB, compute_capability=(7, 0))
_NO_GPU = Machine(gpus=(), num_cpu_cores=8, host_memory_bytes=64 * GIB, host_memory_available_bytes=60 * GIB)
_ONE_NEW = replace(_NO_GPU, gpus=(_H100,))
_ONE_OLD = replace(_NO_GPU, gpus=(_V100,))
_EIGHT_NEW = replace(_NO_GPU, gpus=(_H100,) * 8)
_EIGHT_OLD = replace(_NO_GPU, gpus=(_V100,) * 8)
_MIXED = replace(_NO_GPU, gpus=(_H100, _V100))
_VERSIONS = Versions(python="3.12.4", zerofit="0.1.0")

_ZERO2 = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS)
_CPU = OffloadDevice.CPU


def _choose(machine: Machine, request: Request) -> Plan:
    return choose(machine=machine, versions=_VERSIONS, request=request)


def _on(strategy: Strategy, precision: Precision) -> Strategy:
    return replace(strategy, precision=precision)


def test_a_plan_is_taken_up_as_it_was_made() -> None:
    request = Request(preset="z3-offload", micro_batch_size=2, global_batch_size=64)
    plan = _choose(_EIGHT_NEW, request)
    assert _choose(_EIGHT_NEW, Request(plan=plan)) == plan


def test_a_plan_for_the_cpu_stays_on_the_cpu() -> None:
    plan = _choose(_EIGHT_NEW, Request(on_cpu=True, num_processes=2))
    assert _choose(_EIGHT_NEW, Request(plan=plan)).topology == Topology(world_size=2, on_cpu=True)


def test_a_flag_wins_over_a_plan_and_over_its_reason() -> None:
    plan = _choose(_EIGHT_NEW, Request())
    again = _choose(_EIGHT_NEW, Request(plan=plan, precision=Precision.FP16))
    assert again.strategy == _on(plan.strategy, Precision.FP16)
    assert [reason.origin for reason in again.reasons if reason.field == "precision"] == [Origin.FLAG]


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_the_global_batch_of_a_plan_outlives_a_change_of_ranks(num_processes: int) -> None:
    plan = _choose(_EIGHT_NEW, Request(micro_batch_size=2, global_batch_size=64))
    try:
        again = _choose(_EIGHT_NEW, Request(plan=plan, num_processes=num_processes))
    except UserError:
        return  # refused is as good: what must not be is another batch in silence
    micro_batch_size, steps = again.strategy.micro_batch_size, again.strategy.gradient_accumulation_steps
    assert (micro_batch_size or 0) * (steps or 0) * num_processes == 64
    assert again.workload == Workload(global_batch_size=64)


def test_a_plan_and_a_preset_together_are_refused() -> None:
    plan = _choose(_EIGHT_NEW, Request())
    with pytest.raises(UserError) as error:
        _choose(_EIGHT_NEW, Request(plan=plan, preset="z3"))
    assert error.value.found == "--plan with --preset z3"


@pytest.mark.parametrize(
    ("made_on", "request_", "taken_to", "precision"),
    [
        (_NO_GPU, Request(), _ONE_NEW, Precision.BF16),
        (_NO_GPU, Request(), _ONE_OLD, Precision.FP16),
        (_EIGHT_NEW, Request(preset="z3"), _EIGHT_OLD, Precision.FP16),
        (_EIGHT_NEW, Request(preset="z3"), _NO_GPU, Precision.FP32),
        (_NO_GPU, Request(precision=Precision.BF16), _ONE_NEW, Precision.BF16),
    ],
)
def test_what_nobody_asked_for_is_chosen_anew_on_another_machine(
    made_on: Machine, request_: Request, taken_to: Machine, precision: Precision
) -> None:
    again = _choose(taken_to, Request(plan=_choose(made_on, request_)))
    assert again.strategy.precision is precision
    assert again.topology.on_cpu is (not taken_to.gpus)
    [reason] = [reason for reason in again.reasons if reason.field == "precision"]
    assert reason.value == precision.value


def test_the_default_engine_of_a_plan_follows_the_ranks_and_keeps_what_was_asked_for() -> None:
    plan = _choose(_ONE_NEW, Request())
    assert plan.strategy.engine is Engine.NATIVE
    again = _choose(_EIGHT_NEW, Request(plan=plan, num_processes=8))
    assert (again.strategy, again.topology) == (_on(_ZERO2, Precision.BF16), Topology(world_size=8))
    offloaded = _choose(_EIGHT_NEW, Request(param_offload=_CPU))
    alone = _choose(_ONE_NEW, Request(plan=offloaded, num_processes=1))
    assert alone.strategy == offloaded.strategy


def test_a_plan_of_more_ranks_than_there_are_gpus_is_named_as_the_cause() -> None:
    plan = _choose(_EIGHT_NEW, Request())
    with pytest.raises(UserError) as error:
        _choose(_ONE_NEW, Request(plan=plan))
    assert str(error.value) == (
        "error[more-ranks-than-gpus]: there are fewer GPUs than ranks\n"
        "  found: 8 ranks in the plan on 1 x 1 GPUs\n"
        "  why:   each rank needs a GPU of its own\n"
        "  fix:   set --num-processes to at most 1, or rehearse with --cpu"
    )


def test_a_plan_for_inference_stays_one() -> None:
    plan = _choose(_EIGHT_NEW, Request(preset="z3-inference"))
    assert (plan.trains, _choose(_EIGHT_NEW, Request(plan=plan)).trains) == (False, False)
    assert _choose(_EIGHT_NEW, Request(preset="z3")).trains


def test_blocks_of_a_plan_that_recompute_are_gone_with_checkpointing() -> None:
    plan = _choose(_EIGHT_NEW, Request(gradient_checkpointing=True, checkpoint_every=2))
    again = _choose(_EIGHT_NEW, Request(plan=plan, gradient_checkpointing=False))
    assert (again.strategy.gradient_checkpointing, again.strategy.checkpoint_every) == (False, 1)
    whys = {reason.field: reason.why for reason in again.reasons}
    assert whys["gradient_checkpointing"] == "--no-gradient-checkpointing says so"
    assert "checkpoint_every" not in whys


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Request(tf32=False), "--no-tf32 says so"),
        (Request(lora=Lora()), "--lora says so"),
        (Request(lora=Lora(), quantization=Quantization.NF4, says_qlora=True), "--qlora says so"),
    ],
)
def test_a_reason_names_the_flag_as_it_was_typed(request_: Request, why: str) -> None:
    fields = {"tf32", "lora", "quantization"}
    assert {one.why for one in _choose(_EIGHT_NEW, request_).reasons if one.field in fields} == {why}
