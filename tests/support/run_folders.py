"""Run folders as zerofit leaves them, written without a run: a plan, the ranks' records, logs and the end."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from captures import FACTS, LOOP

from zerofit.core.estimates import (
    Estimate,
    Holder,
    MemoryEstimate,
    PhaseMemory,
    RunPhase,
    StepTime,
    Term,
    TimeTerm,
)
from zerofit.core.facts import Machine, Versions, Workload
from zerofit.core.plan import Origin, Plan, Reason, Topology, plan_to_json
from zerofit.core.rank_observation import LiveFile, Phase, PhasePeak
from zerofit.core.rank_record import RankRecord, record_file
from zerofit.core.strategy import Engine, Precision, Strategy, ZeroStage
from zerofit.core.units import GIB, MIB
from zerofit.machine.gpu_catalog import find_gpu

NAME = "2026-03-01_14-05-09-train"
PID = 3_141_592


def _term(name: str, num_bytes: int, holder: Holder) -> Term:
    return Term(name=name, num_bytes=num_bytes, holder=holder, formula="2 P", source="traced")


def _memory(*sizes: tuple[RunPhase, int]) -> MemoryEstimate:
    phases = tuple(
        PhaseMemory(
            phase=phase,
            terms=(
                _term("weights", GIB, Holder.TENSORS),
                _term("activations", num_bytes, Holder.TENSORS),
                _term("allocator cache", 256 * MIB, Holder.CACHE),
                _term("CUDA context", 512 * MIB, Holder.OUTSIDE),
            ),
        )
        for phase, num_bytes in sizes
    )
    return MemoryEstimate(phases=phases, uncertainty=0.05, uncertainty_source="published runs")


ESTIMATE = Estimate(
    device=_memory(
        (RunPhase.LOAD, 0), (RunPhase.FORWARD, 3 * GIB), (RunPhase.BACKWARD, 4 * GIB), (RunPhase.STEP, GIB)
    ),
    host=_memory((RunPhase.LOAD, GIB)),
    step_time=StepTime(
        terms=(
            TimeTerm(name="matrix products", seconds=0.3, formula="6 P T / rate", source="measured"),
            TimeTerm(name="optimizer", seconds=0.1, formula="28 P / bandwidth", source="measured"),
        ),
        uncertainty=0.3,
        uncertainty_source="published runs",
    ),
    tokens_per_step=8192,
    num_trained=FACTS.num_parameters,
)
PLAN = Plan(
    strategy=Strategy(
        engine=Engine.DEEPSPEED,
        zero_stage=ZeroStage.GRADIENTS,
        precision=Precision.BF16,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
    ),
    topology=Topology(world_size=2),
    machine=Machine(
        gpus=(find_gpu("RTX4090"),) * 2,
        num_cpu_cores=16,
        host_memory_bytes=64 * GIB,
        host_memory_available_bytes=60 * GIB,
    ),
    versions=Versions(python="3.11.2", zerofit="0.1.0", torch="2.9.1+cu128", transformers="5.0.0"),
    workload=Workload(global_batch_size=16, sequence_length=512),
    model=FACTS,
    reasons=(Reason(field="zero_stage", value="2", origin=Origin.PLANNER, why="the fastest that fits"),),
    estimate=ESTIMATE,
    capture=LOOP,
)
"""Two RTX 4090 under ZeRO-2."""
RECORD: dict[str, Any] = {
    "version": 1,
    "command": ["accelerate", "launch", "train.py"],
    "started_at": "2026-03-01T14:05:09+00:00",
    "ended_at": "2026-03-01T14:25:09+00:00",
    "wall_time_s": 1200.0,
    "exit_code": 0,
    "cause": None,
    "kind": None,
    "rank": None,
    "phase": None,
    "step_time_s": 0.45,
    "recoveries": [],
}
"""A run.json."""
RECOVERY = {
    "cause": "out of memory with DeepSpeed ZeRO-2",
    "step": 7,
    "strategy_before": "DeepSpeed ZeRO-1",
    "strategy": "DeepSpeed ZeRO-2",
    "resumed_from": "out/checkpoints/step_5",
    "lost_steps": 2,
    "folder": "recovery-1",
}
OUT_OF_MEMORY = """\
Traceback (most recent call last):
  File "train.py", line 41, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity \
of 23.52 GiB of which 1.10 GiB is free.
"""


def write_run(
    folder: Path,
    *,
    plan: Plan = PLAN,
    record: dict[str, Any] | None = None,
    log: str = "step 1\n",
    num_ranks: int = 2,
    checkpoint: str = "",
) -> Path:
    """Write a run folder and return it.

    Args:
        record: what differs from RECORD in its run.json.
        num_ranks: ranks that leave records of GPU memory; each next one needs 64 MiB more.
        checkpoint: the last checkpoint, as the ranks recorded it.
    """
    for name in ("ranks", "logs"):
        (folder / name).mkdir(parents=True)
    (folder / "plan.json").write_text(plan_to_json(plan))
    (folder / "command.sh").write_text("accelerate launch train.py\n")
    (folder / "run.json").write_text(json.dumps({**RECORD, **(record or {})}))
    for rank in range(num_ranks):
        (folder / "logs" / f"rank{rank}.log").write_text(log)
        more = rank * 64 * MIB
        rank_record = RankRecord(
            rank=rank,
            exit_code=0,
            error_type=None,
            error_message=None,
            peak_host_bytes=2 * GIB + more,
            peak_gpu_allocated_bytes=5 * GIB + more,
            peak_gpu_reserved_bytes=6 * GIB + more,
            changes=("the optimizer is DeepSpeed's",),
        )
        record_file(folder / "ranks", rank).write_text(json.dumps(asdict(rank_record)))
        live = LiveFile(folder / "ranks", rank)
        live.write(Phase.ENDED, (PID, 20, 20, 0, 0, 2 * GIB, 0, 1), (1000.0, 0.5, 100.0))
        for phase, size in ((Phase.FORWARD, 4 * GIB), (Phase.BACKWARD, 5 * GIB)):
            live.write_peak(phase, PhasePeak(allocated_bytes=size + more, reserved_bytes=size + GIB + more))
        live.write_checkpoint(checkpoint)
    return folder


def on_cpu(plan: Plan = PLAN) -> Plan:
    """Return a plan as a rehearsal on CPU ranks runs it."""
    return replace(plan, topology=replace(plan.topology, on_cpu=True))
