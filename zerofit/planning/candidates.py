"""candidates: every strategy worth considering for a problem, and those that compatibility rules forbid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.checking.rules.script.ranks import RULES as RULES_OF_RANKS
from zerofit.core.batch import split_global_batch
from zerofit.core.errors import UserError
from zerofit.core.freezing import FREEZES
from zerofit.core.optimizers.memory import FUSED_ADAMW
from zerofit.core.setting import Said
from zerofit.core.strategy import (
    Buckets,
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    Strategy,
    ZeroStage,
)
from zerofit.planning.engine_order import tries_fsdp2_first
from zerofit.planning.options import Allow
from zerofit.planning.plan_from_flags import default_precision
from zerofit.planning.search import Placement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.engine import Finding
    from zerofit.planning.problem import Problem

SMALL_BUCKETS = Buckets(
    reduce_bucket_size=10_000_000,
    allgather_bucket_size=10_000_000,
    stage3_prefetch_bucket_size=10_000_000,
    stage3_max_live_parameters=100_000_000,
    stage3_max_reuse_distance=100_000_000,
    sub_group_size=100_000_000,
)
"""ASSUMPTION: messages of 20 MB still use most of a link; a tenth of the default frees up to 10 GB."""
DEFAULT_NVME_PATH = "/local_nvme"
"""A plan's placeholder for a folder on another machine's disk, until --nvme-path names it."""

_NEUTRAL: dict[str, Any] = {
    "gradient_checkpointing": None,
    "buckets": Buckets(),
    "lora": None,
    "freeze": (),
}
"""Values that replace the planner's own before the rules run, so that strategies which differ only in these
are checked once."""

_CHECKED_TOGETHER = ("lora", "gradient_checkpointing")
"""Fields of _NEUTRAL that rules check together with another: quantization, or offloaded activations."""

_Trained = tuple[tuple[str, ...], Lora | None, Quantization | None]
"""Frozen parameters, adapters, and the format of the base weights."""
_NONE, _CPU, _NVME = OffloadDevice.NONE, OffloadDevice.CPU, OffloadDevice.NVME
_PLACEMENTS: tuple[Placement, ...] = (
    (Engine.NATIVE, ZeroStage.NOTHING, _NONE, _NONE),
    (Engine.DEEPSPEED, ZeroStage.OPTIMIZER_STATES, _NONE, _NONE),
    (Engine.DEEPSPEED, ZeroStage.GRADIENTS, _NONE, _NONE),
    (Engine.DEEPSPEED, ZeroStage.PARAMETERS, _NONE, _NONE),
    (Engine.DEEPSPEED, ZeroStage.GRADIENTS, _CPU, _NONE),
    (Engine.DEEPSPEED, ZeroStage.PARAMETERS, _CPU, _NONE),
    (Engine.DEEPSPEED, ZeroStage.PARAMETERS, _CPU, _CPU),
    (Engine.DEEPSPEED, ZeroStage.PARAMETERS, _NVME, _NONE),
    (Engine.DEEPSPEED, ZeroStage.PARAMETERS, _NVME, _CPU),
    (Engine.DEEPSPEED, ZeroStage.PARAMETERS, _NVME, _NVME),
    (Engine.FSDP2, ZeroStage.NOTHING, _NONE, _NONE),
    (Engine.FSDP2, ZeroStage.NOTHING, _CPU, _CPU),
)
"""Stage 0 under DeepSpeed and offload at stage 1 are considered only if the user sets them: plain PyTorch and
stage 2 are better at the same cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Strategies that compatibility rules forbid, or whose engine can't train the model."""

    strategy: Strategy
    """An example of them."""
    findings: tuple[Finding, ...]
    """The rules' errors, or what a trace of the engine found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The candidates of a problem's search."""

    strategies: tuple[Strategy, ...]
    """Each with micro-batch and accumulation."""
    dropped: tuple[Dropped, ...]

    def without(self, refused: tuple[Dropped, ...]) -> Candidates:
        """Return the candidates without those of engines that can't train the model."""
        engines = {dropped.strategy.engine for dropped in refused}
        left = tuple(strategy for strategy in self.strategies if strategy.engine not in engines)
        return replace(self, strategies=left, dropped=(*self.dropped, *refused))


def candidates(
    problem: Problem, *, with_fsdp2: bool | None = None, offloads_activations: bool = False
) -> Candidates:
    """Return every strategy worth considering for a problem.

    Args:
        with_fsdp2: True to consider FSDP2 even if nobody named it, False not to, whoever named it.
        offloads_activations: True to consider it even if nobody asked for it.

    Raises:
        UserError: the ranks or the user's batch sizes do not make the global batch, or the script allows none
            of the micro-batches that do.
    """
    batches, said = tuple(_batches(problem)), problem.said.strategy
    strategies: list[Strategy] = []
    dropped: list[Dropped] = []
    verdicts: dict[Strategy, tuple[Finding, ...]] = {}
    wants_fsdp2 = tries_fsdp2_first(problem) if with_fsdp2 is None else with_fsdp2
    for strategy in _without_batches(problem, wants_fsdp2, offloads_activations):
        kept = {*said, *_CHECKED_TOGETHER} if _combines(strategy) else said
        checked = replace(strategy, **{name: value for name, value in _NEUTRAL.items() if name not in kept})
        if checked not in verdicts:
            verdicts[checked] = _errors(checked, problem)
            if verdicts[checked]:
                dropped.append(Dropped(strategy=checked, findings=verdicts[checked]))
        if not verdicts[checked]:
            strategies += [
                replace(strategy, micro_batch_size=micro_batch_size, gradient_accumulation_steps=steps)
                for micro_batch_size, steps in batches
            ]
    return Candidates(strategies=tuple(strategies), dropped=tuple(dropped))


def _combines(strategy: Strategy) -> bool:
    """Return True if a strategy has a field that rules check together with one of _NEUTRAL."""
    return strategy.quantization is not None or strategy.activation_offload


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, in ascending order."""
    low = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*low, *(number // divisor for divisor in low)}))


def _batches(problem: Problem) -> Iterator[tuple[int | None, int | None]]:
    """Yield each (micro-batch, accumulation) that makes the global batch and that the script allows."""
    constraints = problem.constraints
    made = [batch for batch in _batches_made(problem) if _fills_stages(batch[1], problem)]
    if not made:
        raise _too_few_for_stages(problem)
    found = [
        (size, steps)
        for size, steps in made
        if constraints.allow("micro_batch_size", size)
        and constraints.allow("gradient_accumulation_steps", steps)
    ]
    if not found:
        raise _no_batch(problem, made)
    yield from found


def _fills_stages(steps: int | None, problem: Problem) -> bool:
    """Return True if each forward pass of a pipeline has a micro-batch per rank, as 1F1B needs.

    Interleaved 1F1B needs a multiple of the ranks, which run the micro-batches of a stage in rounds.
    """
    topology = problem.topology
    least = topology.pipeline_parallel_size * problem.passes_per_step
    if topology.pipeline_parallel_size == 1 or steps is None:
        return True
    return steps >= least and (not topology.is_interleaved or steps % least == 0)


def _too_few_for_stages(problem: Problem) -> UserError:
    topology = problem.topology
    num_ranks, pipelines = topology.pipeline_parallel_size, topology.data_parallel_size
    passes = f", made in {problem.passes_per_step} passes" if problem.passes_per_step > 1 else ""
    size = problem.workload.global_batch_size
    found = f"a global batch of {size} on {pipelines} pipelines of {num_ranks} ranks{passes}"
    least = num_ranks * problem.passes_per_step * pipelines
    if topology.is_interleaved and size is not None and size > least:
        below = size // least * least
        return UserError(
            "pipeline-batch-not-in-rounds",
            "the global batch makes no whole rounds of micro-batches",
            found=found,
            why=f"interleaved 1F1B runs the micro-batches of a pass by rounds of {num_ranks}, one a rank",
            fix=f"set --global-batch-size to {below} or {below + least}, or --pipeline-stages-per-rank to 1",
        )
    return UserError(
        "pipeline-batch-too-small",
        "the global batch is too small for the stages",
        found=found,
        why="each forward pass needs a micro-batch for each rank, as 1F1B runs them",
        fix="take a larger batch, smaller micro-batches or fewer ranks in a pipeline",
    )


def _no_batch(problem: Problem, made: list[tuple[int | None, int | None]]) -> UserError:
    pin = next(limit for limit in problem.constraints.pins if limit.field == "micro_batch_size")
    sizes = " or ".join(str(size) for size, _ in made)
    return UserError(
        pin.rule,
        "no micro-batch makes the global batch of this script",
        found=f"micro-batches of {sizes}, for a global batch of {problem.workload.global_batch_size}",
        why=pin.why,
        fix="leave out --micro-batch-size and --gradient-accumulation-steps",
    )


def _batches_made(problem: Problem) -> Iterator[tuple[int | None, int | None]]:
    said, ranks = problem.said, problem.topology.data_parallel_size
    size, steps = said.get("micro_batch_size"), said.get("gradient_accumulation_steps")
    total = problem.workload.global_batch_size
    if total is None and problem.script is not None:  # its batches have no known size and stay unchanged
        yield None, None
        return
    if total is None:  # the script's own is unknown; plan for the smallest
        yield size or 1, steps or 1
        return
    if size is not None or steps is not None:
        yield split_global_batch(
            global_batch_size=total,
            micro_batch_size=size,
            gradient_accumulation_steps=steps,
            data_parallel_size=ranks,
            is_asked=problem.script is None or said.has("global_batch_size"),
        )
        return
    per_rank, _ = split_global_batch(
        global_batch_size=total,
        micro_batch_size=None,
        gradient_accumulation_steps=1,
        data_parallel_size=ranks,
    )
    for micro_batch_size in divisors(per_rank):
        yield micro_batch_size, per_rank // micro_batch_size


def _without_batches(problem: Problem, wants_fsdp2: bool, offloads_activations: bool) -> Iterator[Strategy]:
    pinned, nvme_path = problem.said.strategy, problem.said.get("nvme_path")
    settled = {name: pin.values[0] for name, pin in problem.constraints.settled().items()}
    pinned = {**settled, **pinned}
    pinned |= {"nvme_path": None, "micro_batch_size": None, "gradient_accumulation_steps": None}
    for engine, stage, optimizer_offload, param_offload in _placements(problem, wants_fsdp2):
        offloads = optimizer_offload is not _NONE
        uses_nvme = _NVME in (optimizer_offload, param_offload)
        base = Strategy(
            engine=engine,
            zero_stage=stage,
            optimizer_offload=optimizer_offload,
            param_offload=param_offload,
            precision=default_precision(problem.machine),
        )
        path = nvme_path or (DEFAULT_NVME_PATH if uses_nvme else None)
        base = replace(base, **{**pinned, "nvme_path": path})
        deepspeed = engine is Engine.DEEPSPEED
        for precision, optimizer, recomputing, buckets, reshards, trained in product(
            _precisions(problem, engine, base),
            _optimizers(problem, engine, offloads=offloads),
            _checkpointing(problem, base, offloads_activations),
            (Buckets(), SMALL_BUCKETS) if deepspeed else (Buckets(),),
            _resharding(problem, engine, offloads=offloads),
            _trained(problem),
        ):
            (checkpointing, offloaded), (freeze, lora, quantization) = recomputing, trained
            yield replace(
                base,
                precision=precision,
                optimizer=optimizer,
                gradient_checkpointing=checkpointing,
                activation_offload=offloaded,
                buckets=buckets,
                reshard_after_forward=reshards,
                freeze=freeze,
                lora=lora,
                quantization=quantization,
                quant_storage=_storage(base, engine, precision, quantization),
            )


def _storage(
    base: Strategy, engine: Engine, precision: Precision | None, quantization: Quantization | None
) -> Precision | None:
    """Return the dtype that 4-bit weights are stored in: under FSDP2 one that it shards."""
    if quantization is None or engine is not Engine.FSDP2 or base.quant_storage is not None:
        return base.quant_storage
    return precision or Precision.FP32


def _resharding(problem: Problem, engine: Engine, *, offloads: bool) -> tuple[bool, ...]:
    said: bool | None = problem.said.get("reshard_after_forward")
    if said is not None or engine is not Engine.FSDP2 or offloads:
        return (True if said is None else said,)
    return (True, False)


def _placements(problem: Problem, wants_fsdp2: bool) -> tuple[Placement, ...]:
    names = ("engine", "zero_stage", "optimizer_offload", "param_offload")
    pins: dict[str, Any] = {name: problem.said.get(name) for name in names}
    alone = problem.topology.world_size == 1 and pins["engine"] is None and pins["zero_stage"] is None
    has_nvme = problem.machine.nvme_bytes > 0 or problem.said.has("nvme_path")

    def is_wanted(kind: Placement) -> bool:
        if any(pins[name] not in (None, value) for name, value in zip(names, kind, strict=True)):
            return False
        offloads = {kind[2], kind[3]} - {_NONE}
        if not all(map(problem.constraints.allow, names, kind)):
            return False
        if kind[0] is Engine.FSDP2 and not (pins["engine"] or wants_fsdp2):
            return False
        if alone and kind[0] is Engine.DEEPSPEED and not offloads:
            return False  # one rank has nothing to partition
        return has_nvme or _NVME not in offloads or _NVME in pins.values()

    wanted = tuple(kind for kind in _PLACEMENTS if is_wanted(kind))
    if wanted:
        return wanted
    # The user's combination is none of those; the rules say whether it can run.
    offload = pins["optimizer_offload"] or _NONE, pins["param_offload"] or _NONE
    needs_deepspeed = bool(pins["zero_stage"]) or offload != (_NONE, _NONE)
    engine = pins["engine"] or (Engine.DEEPSPEED if needs_deepspeed else Engine.NATIVE)
    stage = pins["zero_stage"]
    if stage is None:
        stage = ZeroStage.PARAMETERS if engine is Engine.DEEPSPEED else ZeroStage.NOTHING
    return ((engine, stage, *offload),)


def _checkpointing(
    problem: Problem, base: Strategy, offloads_activations: bool
) -> tuple[tuple[bool, bool], ...]:
    """Return whether to checkpoint, and whether the blocks' inputs are then on the host."""
    fixed = problem.said.get("gradient_checkpointing")
    if fixed is None and base.activation_offload:
        fixed = True
    wanted = problem.constraints.among("gradient_checkpointing", (False, True)) if fixed is None else (fixed,)
    is_open = offloads_activations and not problem.said.has("activation_offload")
    moves: tuple[bool, ...] = (base.activation_offload,)
    if is_open and problem.constraints.allow("activation_offload", True):
        moves = (False, True)
    return tuple((does, moved and does) for does in wanted for moved in (moves if does else (False,)))


def _precisions(problem: Problem, engine: Engine, base: Strategy) -> tuple[Precision | None, ...]:
    own, script = problem.own_precision, problem.script
    if own is None or script is None or problem.said.has("precision"):
        return (base.precision,)
    if engine is Engine.DEEPSPEED and problem.use.weights is not Precision.FP32:
        # In fp32 DeepSpeed refuses weights of another format (_check_params).
        return (problem.use.weights,)
    return tuple(dict.fromkeys((own, base.precision)))


def _optimizers(problem: Problem, engine: Engine, *, offloads: bool) -> tuple[OptimizerName | None, ...]:
    fixed = problem.said.get("optimizer")
    if fixed is not None:
        return (fixed,)
    if offloads:
        return (None,)  # DeepSpeed's CPU Adam replaces it; under FSDP2 the own one steps on the CPU
    if engine is Engine.FSDP2:
        return problem.constraints.among("optimizer", (None,))
    adafactor = (OptimizerName.ADAFACTOR,) if Allow.ADAFACTOR in problem.allow else ()
    is_fused = problem.use.optimizer == FUSED_ADAMW
    fused = () if is_fused else (OptimizerName.ADAMW,)
    choices = (None, *fused, OptimizerName.ADAMW_8BIT, *adafactor)
    return problem.constraints.among("optimizer", choices)


def _trained(problem: Problem) -> tuple[_Trained, ...]:
    """Return what may train: everything, and the alternatives that the user allows."""
    said = problem.said
    choices: list[_Trained] = [(said.get("freeze") or (), said.get("lora"), said.get("quantization"))]
    if said.has("freeze") or said.has("lora"):
        return tuple(choices)
    allow = problem.constraints.allow
    if Allow.FREEZE in problem.allow and problem.model.vocab_size:
        choices += [(freeze, None, None) for freeze in FREEZES if allow("freeze", freeze)]
    lora = problem.spec.options.allowed_lora or Lora()
    if Allow.LORA in problem.allow and allow("lora", lora):
        choices.append(((), lora, None))
    quantizes = allow("lora", lora) and allow("quantization", Quantization.NF4)
    if Allow.QLORA in problem.allow and quantizes:
        choices.append(((), lora, Quantization.NF4))
    return tuple(choices)


def _errors(strategy: Strategy, problem: Problem) -> tuple[Finding, ...]:
    situation = situation_of_strategy(
        strategy,
        topology=problem.topology,
        versions=problem.versions,
        own_optimizer=_own_optimizer(problem),
        typed=list(problem.said.strategy),
        script=problem.subject.source,
    )
    # Of the rules on the script's source, only those on ranks depend on the strategy.
    on_strategy = check(replace(situation, script=None), rules=ALL_RULES).of(Severity.ERROR)
    on_ranks = check(situation, rules=RULES_OF_RANKS).of(Severity.ERROR)
    return tuple(dict.fromkeys((*on_strategy, *on_ranks)))


def _own_optimizer(problem: Problem) -> Said[str | None] | None:
    """Return the script's own optimizer; None if unknown."""
    script = problem.script
    if script is None or script.optimizer_id is None:
        return None
    name = script.optimizer_id.rpartition(".")[2]
    return Said(value=script.optimizer_id, text=f"the script's {name}")
