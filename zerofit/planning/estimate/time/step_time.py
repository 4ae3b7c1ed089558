"""Time of one optimizer step: a roofline over the log's operators, communication, optimizer and offload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.allocation_log import CostKind, OperatorCost, Pass
from zerofit.core.estimates import StepTime, TimeTerm
from zerofit.core.strategy import Engine, ZeroStage
from zerofit.planning.estimate.time.communication import (
    PassTimes,
    communication,
    num_holders,
    num_micro_batches,
    num_trained,
)
from zerofit.planning.estimate.time.optimizer_step import offload_terms, optimizer_term
from zerofit.planning.estimate.time.speeds import speeds_of

if TYPE_CHECKING:
    from zerofit.core.facts import Machine
    from zerofit.core.rates import Rates
    from zerofit.planning.estimate.engines.engine import Setup
    from zerofit.planning.estimate.time.speeds import Speeds

UNCERTAINTY = 0.3
UNCERTAINTY_SOURCE = (
    "20 published steps of BERT-large, Llama 3.1 8B and Qwen took -12 to 38 % longer than estimated over "
    "closed-form logs, 12 % either way in the median; partly in-sample: some rates were chosen by these steps"
)
LORA_UNCERTAINTY = 0.85
LORA_UNCERTAINTY_SOURCE = (
    "nine published LoRA steps of Qwen took 8 to 106 % longer than estimated over closed-form logs, the "
    "short ones most, where Python bounds the time; partly in-sample"
)
_TERMS = {
    CostKind.MATMUL: "matrix products",
    CostKind.ATTENTION: "attention",
    CostKind.MEMORY: "memory-bound operators",
}
_ROOFLINE = "roofline over the traced operators: https://doi.org/10.1145/1498765.1498785"


def estimate_step_time(setup: Setup, *, machine: Machine, rates: Rates) -> StepTime | None:
    """Return the time of one optimizer step, all its micro-batches, as terms that sum.

    Where two things overlap, the longer one has all of the time: what hides behind computation adds nothing.

    Args:
        setup: the log, which must carry costs, and the strategy with micro-batch and accumulation filled in.
        machine: one node; its first GPU stands for all.
        rates: what is achieved of the machine's peaks.

    Returns:
        None on the CPU, or where the peaks of the GPU or of a link that the run needs are not known.
    """
    speeds = speeds_of(machine, setup.topology, rates)
    if speeds is None:
        return None
    passes = {one: _Pass(setup, speeds, one) for one in Pass}
    terms = [*_compute_terms(setup, passes)]
    if setup.trains:
        times = PassTimes(
            forward_s=passes[Pass.FORWARD].seconds,
            backward_s=passes[Pass.RECOMPUTATION].seconds + passes[Pass.BACKWARD].seconds,
        )
        exchange = communication(setup, speeds, times)
        if exchange is not None:
            terms.append(
                TimeTerm(
                    name="communication",
                    seconds=exchange.seconds,
                    formula=exchange.formula,
                    source=f"{exchange.source}; {speeds.bus_source}",
                )
            )
        terms += [optimizer_term(setup, speeds), *offload_terms(setup, speeds, times)]
    is_lora = setup.trains_adapters
    return StepTime(
        terms=tuple(term for term in terms if term.seconds > 0),
        uncertainty=LORA_UNCERTAINTY if is_lora else UNCERTAINTY,
        uncertainty_source=LORA_UNCERTAINTY_SOURCE if is_lora else UNCERTAINTY_SOURCE,
    )


class _Pass:
    """Seconds of one pass over one micro-batch, by what bounds its operators."""

    def __init__(self, setup: Setup, speeds: Speeds, which: Pass) -> None:
        strategy = setup.strategy
        trains = setup.trains or which is Pass.FORWARD
        costs = [cost for cost in setup.log.costs if cost.during is which] if trains else []
        memory_share = dispatch_share = speeds.compiled if strategy.compile else 1.0
        self.by_kind = dict.fromkeys(CostKind, 0.0)
        for cost in costs:
            share = memory_share if cost.kind is CostKind.MEMORY else 1.0
            self.by_kind[cost.kind] += share * _gpu_seconds(cost, strategy.micro_batch_size or 1, speeds)
        dispatch = dispatch_share * speeds.dispatch_s * sum(cost.count for cost in costs)
        if costs and strategy.engine is Engine.DEEPSPEED:
            dispatch += _hooks_s(setup, speeds, which)
        # The CPU runs ahead of the GPU: operators that start slower than they run leave the GPU waiting.
        self.waits_s = max(0.0, dispatch - sum(self.by_kind.values()))
        self.seconds = sum(self.by_kind.values()) + self.waits_s


def _hooks_s(setup: Setup, speeds: Speeds, which: Pass) -> float:
    """Return the seconds of Python that ZeRO's hooks take in one pass."""
    stage = setup.strategy.zero_stage
    if stage is ZeroStage.PARAMETERS:
        return speeds.hook_s * num_holders(setup)
    if stage is ZeroStage.NOTHING or which is not Pass.BACKWARD:
        return 0.0
    # Stage 1 sums gradients in place until the last micro-batch.
    times = 1.0 if stage is ZeroStage.GRADIENTS else 1 / num_micro_batches(setup)
    return times * speeds.gradient_hook_s * num_trained(setup)


def _gpu_seconds(cost: OperatorCost, micro_batch_size: int, speeds: Speeds) -> float:
    """Return the seconds that all calls of an operator keep the GPU busy in one micro-batch."""
    flops = cost.fixed_flops + cost.flops_per_sample * micro_batch_size
    num_bytes = cost.fixed_bytes + cost.bytes_per_sample * micro_batch_size
    seconds = num_bytes / speeds.memory_bytes_per_s
    if cost.kind is not CostKind.MEMORY:
        seconds = max(seconds, flops / speeds.flops_per_s(cost.kind, cost.precision))
    return cost.count * seconds


def _compute_terms(setup: Setup, passes: dict[Pass, _Pass]) -> list[TimeTerm]:
    times = num_micro_batches(setup)
    first = (passes[Pass.FORWARD], passes[Pass.BACKWARD])
    terms = [
        TimeTerm(
            name=name,
            seconds=times * sum(one.by_kind[kind] for one in first),
            formula="micro-batches x sum of max(FLOPs / rate, bytes / bandwidth)"
            if kind is not CostKind.MEMORY
            else "micro-batches x sum of bytes / bandwidth",
            source=_ROOFLINE,
        )
        for kind, name in _TERMS.items()
    ]
    terms.append(
        TimeTerm(
            name="launch overhead",
            seconds=times * sum(one.waits_s for one in first),
            formula="micro-batches x max(0, operators x dispatch - their time on the GPU), each pass",
            source="the rate of dispatch",
        )
    )
    terms.append(
        TimeTerm(
            name="recomputation",
            seconds=times * passes[Pass.RECOMPUTATION].seconds,
            formula="micro-batches x the checkpointed layers' second forward pass",
            source=_ROOFLINE,
        )
    )
    return terms
