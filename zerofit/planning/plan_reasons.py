"""plan_of: the Plan of a search result, with the reason for each value and why each other strategy lost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.constraints import UNCHANGED
from zerofit.core.capture import for_plan
from zerofit.core.overrides import FLAGS
from zerofit.core.plan import GROUP_FLAGS, Origin, Plan, Reason, Rejected
from zerofit.core.strategy import (
    Buckets,
    Engine,
    OffloadDevice,
    OptimizerName,
    ZeroStage,
    describe_strategy,
    show,
)
from zerofit.core.units import format_apart
from zerofit.planning.candidates import DEFAULT_NVME_PATH
from zerofit.planning.engine_order import first_engine
from zerofit.planning.plan_from_flags import origin_of, reasons_by_flag, why_precision
from zerofit.planning.search import (
    OFFLOAD_TIER,
    TIME_TIE_SHARE,
    RuledOut,
    placement_of,
    simplicity,
    tier,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.strategy import Precision, Strategy
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import EstimatedStrategy, TrainingResult, Untraced

_OPTIMIZER_REASONS = {
    OptimizerName.ADAMW: "fused AdamW computes the same without the temporary roots of the second moments",
    OptimizerName.ADAMW_8BIT: "nothing fits with fp32 optimizer states; 8-bit states take a quarter",
    OptimizerName.ADAFACTOR: "nothing fits with AdamW, and --allow adafactor permits it",
}


_IMPLIED = ("zero_stage", "optimizer_offload", "param_offload", *UNCHANGED)
"""Fields that the reason for the engine covers, and those that only the user changes."""


def plan_of(found: TrainingResult, problem: Problem) -> Plan:
    """Return the plan of the choice, or of the nearest strategy if nothing fits."""
    head = found.chosen or found.nearest
    if head is None:
        raise ValueError("a search without candidates has no plan")
    return Plan(
        strategy=head.strategy,
        topology=problem.topology,
        machine=problem.machine,
        versions=problem.versions,
        workload=problem.workload,
        model=problem.model,
        reasons=tuple(_reasons(head, found, problem)),
        rejected=rejected(found, problem),
        estimate=head.estimate,
        capture=None if problem.script is None else for_plan(problem.script.capture),
    )


def rejected(found: TrainingResult, problem: Problem) -> tuple[Rejected, ...]:
    """Return every strategy that was compared with the choice, with the reason why it lost."""
    losers = [(other.strategy, why_it_loses(other, found.chosen, problem)) for other in found.others]
    losers += [(variant.strategy, why_it_loses(variant, found.chosen, problem)) for variant in found.variants]
    for out in found.ruled_out:
        what = "weights, gradients, states, CUDA context and NCCL of its smallest variant"
        what = f"activations, {what}" if out.is_live else what
        losers.append((out.strategy, f"{what} take {_at_least(out, problem)}"))
    if found.untraced is not None:
        losers.append((found.untraced.strategy, why_untraced(found.untraced, found, problem)))
    return tuple(Rejected(strategy=strategy, why=why) for strategy, why in losers)


def _at_least(bounded: RuledOut | Untraced, problem: Problem) -> str:
    """Return a lower bound beside the limit that it exceeds."""
    least, limit = format_apart(bounded.least_bytes, problem.device_bytes)
    return f"at least {least} of {limit} on each GPU"


def why_untraced(untraced: Untraced, found: TrainingResult, problem: Problem) -> str:
    """Return what is known of FSDP2 without a trace of it, beside ZeRO-3 if that fits, else the choice."""
    if untraced.least_bytes > problem.device_bytes:
        return f"needs {_at_least(untraced, problem)}"
    judged = [*found.others, *((found.chosen,) if found.chosen is not None else ())]
    beside = next((other for other in judged if other.fits and _is_zero_3(other.strategy)), found.chosen)
    why = f"not traced, as {first_engine(problem)[1]}: --engine fsdp2 plans it"
    time = beside.estimate.step_time if beside is not None else None
    if beside is None or time is None or untraced.seconds is None:
        return why
    ratio = untraced.seconds / time.seconds
    how = "about as fast as"
    if abs(ratio - 1) > TIME_TIE_SHARE:
        how = f"perhaps {abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'less time'} than"
    return f"{how} {describe_strategy(replace(beside.strategy, precision=None))}; {why}"


def _is_zero_3(strategy: Strategy) -> bool:
    return strategy.zero_stage is ZeroStage.PARAMETERS and not strategy.offloads


def why_it_loses(
    loser: EstimatedStrategy | RuledOut, chosen: EstimatedStrategy | None, problem: Problem
) -> str:
    """Return why a strategy was not chosen, in one phrase."""
    if isinstance(loser, RuledOut):
        return f"needs {_at_least(loser, problem)}"
    if not loser.fits:
        return loser.shortage
    if chosen is None:
        return "fits"
    ours, its = chosen.estimate.step_time, loser.estimate.step_time
    if ours is None or its is None:
        return "the simplest is taken, as no times are known"
    ratio = its.seconds / ours.seconds
    if ratio >= 2:
        return f"takes {ratio:.1f} times as long"
    percent = round(100 * (ratio - 1))
    if percent > 0:
        return f"{percent}% slower"
    is_faster = percent < 0
    less = f"{-percent}% less time" if is_faster else "as fast"
    if problem.is_close(loser.estimate) and not problem.is_close(chosen.estimate):
        return f"{less}, but may not fit"
    if _may_not_fit_gpu(loser, problem) and not _may_not_fit_gpu(chosen, problem) and is_faster:
        return f"{less}, but may not fit on the GPU"
    if tier_in(problem, loser.strategy) == OFFLOAD_TIER > tier_in(problem, chosen.strategy):
        return f"{less} by the estimate; offload comes after what fits on the GPUs"
    if tier_in(problem, loser.strategy) > tier_in(problem, chosen.strategy):
        return f"{less}, and changes what is computed"
    why = _why_second(loser.strategy, chosen.strategy, problem)
    words = f"{less}, within the estimate's error" if is_faster else "no faster"
    return f"{words}, and {why}" if why else words


def _may_not_fit_gpu(judged: EstimatedStrategy, problem: Problem) -> bool:
    return problem.is_close_on_gpu(judged.estimate.device)


def _why_second(loser: Strategy, chosen: Strategy, problem: Problem) -> str:
    """Return why a strategy comes after another that takes as long; empty if it is the simpler one."""
    first, why = first_engine(problem)
    pairs = zip(simplicity(loser, first), simplicity(chosen, first), strict=True)
    differing = [place for place, (key, other) in enumerate(pairs) if key != other]
    if not differing or simplicity(loser, first) < simplicity(chosen, first):
        return ""
    if {loser.engine, chosen.engine} == {*_SHARDING} and differing[0] == _ENGINE:
        return f"{_SHARDING[first]} comes before {_SHARDING[loser.engine]}, as {why}"
    return f"more complex: {_MORE_COMPLEX[differing[0]].format(engine=_SHARDING.get(loser.engine))}"


_SHARDING = {Engine.DEEPSPEED: "DeepSpeed", Engine.FSDP2: "FSDP2"}
_ENGINE = 1
"""The place of the engine in a key of `simplicity`."""
_MORE_COMPLEX = (
    "it offloads more",
    "it needs {engine}",
    "a higher ZeRO stage",
    "it keeps gathered weights",
    "it recomputes activations",
    "it offloads activations",
    "smaller buckets",
    "another optimizer",
    "smaller micro-batches",
)
"""What makes a strategy more complex, by the place in a key of `simplicity` that differs first."""


def tier_in(problem: Problem, strategy: Strategy) -> float:
    """Return a strategy's tier, given the script and the user's flags."""
    return tier(strategy, fixed=problem.said.strategy, own_precision=problem.own_precision)


def _reasons(head: EstimatedStrategy, found: TrainingResult, problem: Problem) -> Iterator[Reason]:
    strategy, said = head.strategy, problem.said
    settled = problem.constraints.settled()

    def is_open(field: str) -> bool:
        return not said.has(field) and field not in settled

    yield from _of_script(strategy, problem)
    if is_open("engine") and is_open("zero_stage"):
        field = "zero_stage" if strategy.engine is Engine.DEEPSPEED else "engine"
        yield _chosen(strategy, field, _why_kind(head, found, problem))
    yield from _of_groups(problem)
    yield from reasons_by_flag(problem.spec)
    for field in ("optimizer_offload", "param_offload"):
        device = getattr(strategy, field)
        if device is not OffloadDevice.NONE and not said.has(field):
            yield _chosen(strategy, field, _why_offloaded(field, head, found, problem))
    if strategy.nvme_path == DEFAULT_NVME_PATH and not said.has("nvme_path"):
        yield _chosen(strategy, "nvme_path", "a placeholder for a folder on the NVMe disk: set --nvme-path")
    if is_open("precision") and strategy.precision is not None:
        yield _chosen(strategy, "precision", _why_precision(strategy.precision, problem))
    if is_open("micro_batch_size"):
        yield _chosen(strategy, "micro_batch_size", _why_micro_batch(head, found, problem))
    if is_open("gradient_accumulation_steps") and problem.workload.global_batch_size:
        parts = f"{strategy.micro_batch_size} x {strategy.gradient_accumulation_steps}"
        why = f"global batch {problem.workload.global_batch_size} = {parts} x "
        why += f"{problem.topology.data_parallel_size} ranks"
        yield _chosen(strategy, "gradient_accumulation_steps", why)
    if is_open("gradient_checkpointing"):
        yield _chosen(strategy, "gradient_checkpointing", _why_checkpointing(head, found, problem))
    if strategy.activation_offload and not said.has("activation_offload"):
        yield _chosen(strategy, "activation_offload", _why_activations_move(head, found, problem))
    if not said.has("optimizer") and strategy.optimizer is not None:
        yield _chosen(strategy, "optimizer", _OPTIMIZER_REASONS[strategy.optimizer])
    if strategy.freeze and not said.has("freeze"):
        yield _chosen(strategy, "freeze", "nothing fits if all weights train, and --allow freeze permits it")
    if strategy.lora is not None and not said.has("lora"):
        allowed = "lora" if strategy.quantization is None else "qlora"
        why = f"nothing fits if all weights train, and --allow {allowed} permits it"
        yield _chosen(strategy, "lora", why)
        if strategy.quantization is not None:
            yield _chosen(strategy, "quantization", why)
    if strategy.quant_storage is not None and not said.has("quant_storage"):
        why = (
            "FSDP2 shards floating types alone: the same bytes as in uint8, which every rank would hold whole"
        )
        yield _chosen(strategy, "quant_storage", why)
    if strategy.buckets != Buckets():
        value = f"{strategy.buckets.reduce_bucket_size} elements"
        why = "the default buckets do not fit, or are no faster"
        yield Reason(field="buckets", value=value, origin=Origin.PLANNER, why=why)


def _of_groups(problem: Problem) -> Iterator[Reason]:
    """Yield why ranks share samples, for each kind of parallelism beyond data parallelism."""
    for name, flag in GROUP_FLAGS.items():
        size = getattr(problem.topology, name)
        if size > 1:
            origin = Origin.PLANNER if problem.why_shared else origin_of(name, problem.said)
            place = problem.said.where(name) if problem.said.is_in_file(name) else flag
            why = problem.why_shared or f"{place} says so"
            yield Reason(field=name, value=str(size), origin=origin, why=why)


def _of_script(strategy: Strategy, problem: Problem) -> Iterator[Reason]:
    """Yield why fields that have a flag keep the script's value."""
    for name, pin in problem.constraints.settled().items():
        if name in FLAGS and name not in _IMPLIED and not problem.said.has(name):
            value = getattr(strategy, name)
            said = "as the script says" if value is None else show(value)
            yield Reason(field=name, value=said, origin=Origin.SCRIPT, why=pin.why)


def _why_precision(precision: Precision, problem: Problem) -> str:
    if problem.own_precision is None:
        return why_precision(precision, problem.machine)
    if precision is problem.own_precision:
        return "the script names none, which is fp32"
    return f"the script names none, and nothing fits in {problem.own_precision.value}"


def _chosen(strategy: Strategy, field: str, why: str) -> Reason:
    return Reason(field=field, value=show(getattr(strategy, field)), origin=Origin.PLANNER, why=why)


def _why_kind(head: EstimatedStrategy, found: TrainingResult, problem: Problem) -> str:
    if not head.fits:
        return "nothing fits; this is the nearest"
    losers = rejected(replace(found, variants=()), problem)
    if not losers:
        return "the only combination of stage and offload that the settings allow"
    first = _why_first(head, found, problem)
    second = f"{describe_strategy(losers[0].strategy)}: {losers[0].why}"
    return first if first.endswith(second) else f"{first}; next is {second}"


def _why_first(head: EstimatedStrategy, found: TrainingResult, problem: Problem) -> str:
    """Return by what the choice wins: it is the fastest, the simplest or the safest."""
    ours = head.estimate.step_time
    fitting = [other for other in found.others if other.fits]
    timed = [(other.estimate.step_time.seconds, other) for other in fitting if other.estimate.step_time]
    if ours is None or len(timed) < len(fitting):
        return "the simplest that fits"
    if all(seconds >= ours.seconds for seconds, _ in timed):
        return "the fastest that fits"
    seconds, fastest = min(timed, key=lambda other: other[0])
    if seconds * (1 + TIME_TIE_SHARE) < ours.seconds:
        lost = why_it_loses(fastest, head, problem)
        return f"it surely fits; the fastest is {describe_strategy(fastest.strategy)}: {lost}"
    return f"the simplest of those that fit within {TIME_TIE_SHARE:.0%} of the fastest"


def _why_offloaded(field: str, head: EstimatedStrategy, found: TrainingResult, problem: Problem) -> str:
    other = "param_offload" if field == "optimizer_offload" else "optimizer_offload"
    if problem.said.get(other) not in (None, OffloadDevice.NONE):
        return f"{FLAGS[other]} says that something is offloaded; the best that fits has this too"
    stays = [judged for judged in found.others if judged.fits and not judged.strategy.offloads]
    if head.fits and stays:  # with another optimizer, say: that changes what is computed
        return "nothing fits without offload unless the training changes"
    return "nothing fits without offload"


def _why_micro_batch(head: EstimatedStrategy, found: TrainingResult, problem: Problem) -> str:
    size = head.strategy.micro_batch_size or 1
    larger = [variant for variant in found.variants if (variant.strategy.micro_batch_size or 1) > size]
    script = problem.script
    if script is not None and size == script.micro_batch_size and head.fits:
        return "the script's own batch, not split"
    if not larger:
        if head.strategy.gradient_accumulation_steps == 1:
            return "the whole global batch in one pass"
        return "the smallest possible" if not head.fits else "the largest that fits"
    other = larger[0]
    return f"with {other.strategy.micro_batch_size}: {why_it_loses(other, head, problem)}"


def _why_activations_move(head: EstimatedStrategy, found: TrainingResult, problem: Problem) -> str:
    on_gpu = next((variant for variant in found.variants if _keeps_inputs_on_gpu(variant.strategy)), None)
    if on_gpu is None:
        return "nothing fits on the GPUs with the same training"
    return f"with them on the GPU: {why_it_loses(on_gpu, head, problem)}"


def _keeps_inputs_on_gpu(strategy: Strategy) -> bool:
    return bool(strategy.gradient_checkpointing) and not strategy.activation_offload


def _why_checkpointing(head: EstimatedStrategy, found: TrainingResult, problem: Problem) -> str:
    if not head.strategy.gradient_checkpointing:
        return "activations fit, and recomputing them takes time" if head.fits else "this is the nearest"
    kept = [
        variant
        for variant in found.variants
        if not variant.strategy.gradient_checkpointing
        and placement_of(variant.strategy) == placement_of(head.strategy)
    ]
    if not kept:
        return "without it activations do not fit"
    return f"without it: {why_it_loses(kept[0], head, problem)}"
