"""Recovery from out of memory: the next plan's memory limits, kept settings and lost steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planning_problems import problem, spec_of
from small_runs import PLAN, observation

from zerofit.core.checkpoints import Manifest, SavedCheckpoint, SavedLayout
from zerofit.core.estimates import Estimate, Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.overrides import overrides
from zerofit.core.plan import Topology
from zerofit.core.rank_observation import Phase
from zerofit.core.strategy import Engine, Lora, OptimizerName, Precision, Strategy, ZeroStage
from zerofit.core.units import GIB
from zerofit.launching.diagnose import EndKind, RunEnd
from zerofit.launching.recover import (
    Recovery,
    fields_of_checkpoint,
    limits_after,
    lost_steps,
    record_recoveries,
    with_groups_of,
    with_training_of,
)
from zerofit.launching.run_folder import RunFolder
from zerofit.planning.options import MemoryLimits


def _memory(phase: RunPhase, tensors: int, outside: int = 0) -> PhaseMemory:
    sizes = {Holder.TENSORS: tensors, Holder.OUTSIDE: outside}
    return PhaseMemory(
        phase=phase,
        terms=tuple(
            Term(name=holder.value, num_bytes=size, holder=holder, formula="", source="")
            for holder, size in sizes.items()
        ),
    )


def _estimate(host: int = 0, **tensors: int) -> Estimate:
    """Return an estimate of a GPU's tensors by phase, each with 1 GiB outside of torch's allocator."""
    return Estimate(
        device=MemoryEstimate(
            phases=tuple(_memory(RunPhase(name), size, outside=GIB) for name, size in tensors.items()),
            uncertainty=0.1,
            uncertainty_source="",
        ),
        host=MemoryEstimate(phases=(_memory(RunPhase.STEP, host),), uncertainty=0.1, uncertainty_source=""),
        step_time=None,
        tokens_per_step=0,
    )


def _end(
    phase: Phase = Phase.FORWARD,
    *,
    step: int = 0,
    saved: int = 0,
    peak: int | None = 10 * GIB,
    missing: int | None = None,
    room: int | None = None,
) -> RunEnd:
    return RunEnd(
        exit_code=1,
        cause="out of memory",
        kind=EndKind.GPU_OUT_OF_MEMORY,
        rank=0,
        phase=phase,
        peak_bytes=peak,
        missing_bytes=missing,
        available_bytes=room,
        observed=observation(phase, step=step, checkpoint_step=saved),
    )


def test_the_failed_phase_must_shrink_and_no_phase_may_exceed_the_available_memory() -> None:
    """10 GiB were asked for and 8 were there: the estimate of 20 GiB is of the same, so 16 GiB are there."""
    estimate = _estimate(forward=20 * GIB, backward=30 * GIB)
    limits = limits_after(MemoryLimits(), estimate, _end(missing=2 * GIB))
    assert dict(limits.phases) == {
        RunPhase.FORWARD: pytest.approx(0.95 * 16 * GIB),
        None: 16 * GIB,
    }


def test_phases_of_a_completed_step_had_enough_memory() -> None:
    estimate = _estimate(forward=20 * GIB, backward=30 * GIB)
    limits = limits_after(MemoryLimits(), estimate, _end(missing=2 * GIB, step=1))
    assert dict(limits.phases) == {RunPhase.FORWARD: pytest.approx(0.95 * 16 * GIB), None: 30 * GIB}


@pytest.mark.parametrize(("step", "most_gib"), [(0, 12), (1, 30)])
def test_no_phase_may_exceed_what_tensors_could_use(step: int, most_gib: int) -> None:
    """The script allows itself 12 GiB, and 1 MiB was missing: 20 GiB of the estimate were never there."""
    estimate = _estimate(forward=20 * GIB, backward=30 * GIB)
    limits = limits_after(MemoryLimits(), estimate, _end(missing=2**20, room=12 * GIB, step=step))
    assert dict(limits.phases) == {RunPhase.FORWARD: int(0.95 * 12 * GIB), None: most_gib * GIB}


def test_for_a_phase_without_an_estimate_the_largest_one_is_lowered() -> None:
    limits = limits_after(MemoryLimits(), _estimate(forward=20 * GIB), _end(Phase.EVALUATING, missing=None))
    assert min(size for _, size in limits.phases) == pytest.approx(0.95 * 20 * GIB)
    assert {phase for phase, _ in limits.phases} == {None}


def test_limits_of_earlier_attempts_stay() -> None:
    before = MemoryLimits(phases=((RunPhase.STEP, 5),))
    limits = limits_after(before, _estimate(forward=GIB), _end())
    assert (RunPhase.STEP, 5) in limits.phases
    assert limits_after(before, None, _end()) == before


def test_out_of_host_memory_lowers_only_the_host_limit() -> None:
    end = RunEnd(exit_code=137, cause="", kind=EndKind.HOST_OUT_OF_MEMORY)
    limits = limits_after(MemoryLimits(), _estimate(host=100 * GIB, forward=GIB), end)
    assert limits == MemoryLimits(host_bytes=95 * GIB)


def test_out_of_host_memory_on_cpu_ranks_lowers_the_gpu_limit() -> None:
    end = replace(_end(Phase.BACKWARD, step=3, peak=GIB), kind=EndKind.HOST_OUT_OF_MEMORY)
    estimate = _estimate(host=100 * GIB, forward=10 * GIB, backward=20 * GIB)
    limits = limits_after(MemoryLimits(), estimate, end, on_cpu=True)
    assert limits == MemoryLimits(phases=((RunPhase.BACKWARD, 19 * GIB), (None, 20 * GIB)))


@pytest.mark.parametrize("missing", [None, 1, 2 * GIB])
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATING])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_each_plan_needs_less_than_all_failed_ones(
    phase: Phase, missing: int | None, *, on_cpu: bool
) -> None:
    """So a run needs no other sign that it gets on."""
    failed = _estimate(forward=20 * GIB, backward=30 * GIB)
    limits = limits_after(MemoryLimits(), failed, _end(phase, missing=missing, step=3), on_cpu=on_cpu)
    beyond = problem(limits=limits).beyond_limits(failed.device)
    assert beyond is not None
    assert beyond.endswith("more than allowed after running out of memory")


@pytest.mark.parametrize(
    ("phase", "limit_gib", "beyond"),
    [
        (RunPhase.FORWARD, 18, "its tensors need 20.0 GiB in phase forward, 2.0 GiB more"),
        (RunPhase.FORWARD, 20, None),
        (RunPhase.SAVE, 18, "its tensors need 30.0 GiB, 12.0 GiB more"),
        (None, 18, "its tensors need 30.0 GiB, 12.0 GiB more"),
        (None, 30, None),
    ],
)
def test_what_needs_more_than_an_earlier_attempt_had_says_in_which_phase(
    phase: RunPhase | None, limit_gib: int, beyond: str | None
) -> None:
    limits = MemoryLimits(phases=((phase, limit_gib * GIB),))
    found = problem(limits=limits).beyond_limits(_estimate(forward=20 * GIB, backward=30 * GIB).device)
    assert found == (beyond and f"{beyond} than allowed after running out of memory")


def test_cuda_workspaces_are_not_scaled_on_cpu_ranks() -> None:
    """No CPU rank has 16 of the 20 GiB: half of what was asked for was there, so 2 GiB of the others."""
    terms = tuple(
        Term(name=name, num_bytes=size, holder=Holder.TENSORS, formula="", source="")
        for name, size in (("kernel workspaces", 16 * GIB), ("weights", 4 * GIB))
    )
    estimate = _estimate()
    device = replace(estimate.device, phases=(PhaseMemory(phase=RunPhase.FORWARD, terms=terms),))
    failed = replace(estimate, device=device)
    limits = limits_after(MemoryLimits(), failed, _end(missing=5 * GIB), on_cpu=True)
    assert limits.phases == ((RunPhase.FORWARD, int(17.9 * GIB)), (None, 18 * GIB))


def _checkpoint(step: int | None) -> SavedCheckpoint:
    layout = SavedLayout(
        engine="native", world_size=1, zero_stage=0, optimizer_offload="none", optimizer=None
    )
    return SavedCheckpoint(
        path=Path("c"),
        problem=None,
        saved_at=0,
        manifest=Manifest(layout=layout, step=step, files=(), saved_at=0),
    )


@pytest.mark.parametrize(
    ("engine", "optimizer", "fields"),
    [
        (Engine.NATIVE, None, {"engine", "precision"}),
        (Engine.DEEPSPEED, "torch.optim.adamw.AdamW", {"engine", "precision"}),
        (Engine.DEEPSPEED, "torch.optim.sgd.SGD", {"engine", "precision", "zero_stage"}),
        (Engine.FSDP2, "torch.optim.adamw.AdamW", {"engine", "precision", "state_dict_type"}),
        (Engine.FSDP2, "torch.optim.sgd.SGD", {"engine", "precision", "state_dict_type"}),
    ],
)
def test_the_next_plan_keeps_what_its_checkpoint_needs(
    engine: Engine, optimizer: str | None, fields: set[str]
) -> None:
    layout = SavedLayout(
        engine=engine.value, world_size=2, zero_stage=0, optimizer_offload="none", optimizer=optimizer
    )
    assert {*fields_of_checkpoint(Strategy(engine=engine), layout)} == fields


def test_lost_steps_are_those_after_the_checkpoint() -> None:
    assert lost_steps(_end(step=7, saved=5), None) == 7
    assert lost_steps(_end(step=7, saved=5), _checkpoint(None)) == 2
    assert lost_steps(_end(step=7, saved=5), _checkpoint(4)) == 3
    assert lost_steps(RunEnd(exit_code=137, cause="", kind=EndKind.HOST_OUT_OF_MEMORY), None) is None


def test_a_plan_files_training_settings_are_kept_when_its_strategy_is_not() -> None:
    strategy = Strategy(
        zero_stage=ZeroStage.GRADIENTS,
        optimizer=OptimizerName.LION,
        precision=Precision.BF16,
        lora=Lora(),
        micro_batch_size=8,
    )
    plan = replace(PLAN, strategy=strategy, topology=Topology(world_size=4))
    plan = replace(plan, workload=replace(plan.workload, global_batch_size=64))
    found = with_training_of(spec_of(plan=plan, precision=Precision.FP16), plan)
    of_plan = {
        "optimizer": OptimizerName.LION,
        "lora": Lora(),
        "world_size": 4,
        "global_batch_size": 64,
    }
    expected = overrides("the plan file", **of_plan).over(overrides(precision=Precision.FP16))
    assert (found.overrides, found.plan) == (expected, None)
    own = spec_of(zero_stage=ZeroStage.PARAMETERS)
    assert with_training_of(own, plan) is own  # the planner's own plan: all of it is open


def test_parallel_groups_are_kept() -> None:
    topology = Topology(world_size=4, tensor_parallel_size=2)
    kept = with_groups_of(spec_of(zero_stage=ZeroStage.GRADIENTS), replace(PLAN, topology=topology))
    values = {name: said.value for name, said in kept.overrides.said.items()}
    assert values == {
        "zero_stage": ZeroStage.GRADIENTS,
        "tensor_parallel_size": 2,
        "sequence_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "pipeline_stages_per_rank": 1,
        "dp_replicate_size": 1,
    }
    assert kept.overrides.where("tensor_parallel_size") == "the plan before"
    in_stages = Topology(world_size=4, pipeline_parallel_size=2, pipeline_stages_per_rank=2)
    kept = with_groups_of(spec_of(), replace(PLAN, topology=in_stages))
    stages = [kept.overrides.get(f"pipeline_{name}") for name in ("parallel_size", "stages_per_rank")]
    assert stages == [2, 2]
    by_flag = spec_of(tensor_parallel_size=2)
    kept = with_groups_of(by_flag, replace(PLAN, topology=topology))
    assert kept.overrides.where("tensor_parallel_size") == "--tensor-parallel-size"


def test_the_record_has_the_recoveries_and_the_final_end(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path)
    folder.run.write_text(
        json.dumps({"started_at": "2026-01-01T00:00:00+00:00", "exit_code": 1, "cause": "full"})
    )
    recovery = Recovery(
        cause="full",
        step=5,
        strategy_before="DDP",
        strategy="ZeRO-2",
        resumed_from="/c",
        lost_steps=1,
        folder=str(tmp_path / "recovery-1"),
    )
    record_recoveries(folder, (recovery,))
    began = json.loads(folder.run.read_text())
    assert (began["exit_code"], began["recoveries"][0]["resumed_from"]) == (1, "/c")
    record_recoveries(folder, (recovery,), RunEnd(exit_code=0, cause=None))
    ended = json.loads(folder.run.read_text())
    assert (ended["exit_code"], ended["cause"], len(ended["recoveries"])) == (0, None, 1)
    assert ended["wall_time_s"] > 0
