"""FastJudge: estimates over made logs: live tensors by closed forms, and a share for the allocator."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, Term
from zerofit.planning.estimate.closed_form.log import SOURCE
from zerofit.planning.estimate.device_memory.memory import tensor_terms
from zerofit.planning.estimate.device_memory.replay import replay_live
from zerofit.planning.estimate.device_memory.tape import Tape
from zerofit.planning.estimate.engines.choose_engine import make_engine
from zerofit.planning.estimate.engines.engine import TRACED_TERMS, play
from zerofit.planning.judge import EstimatingJudge

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.core.estimates import StepTime
    from zerofit.core.rates import Rates
    from zerofit.core.strategy import Strategy
    from zerofit.planning.estimate.device_memory.replay import PhasePeak
    from zerofit.planning.estimate.engines.engine import Engine, Setup
    from zerofit.planning.problem import Problem

CACHE_SHARE = 0.06
"""Of the live tensors, what the allocator reserves beyond them.

ASSUMPTION: in nine published BERT-large runs live tensors and context alone were 1.4 to 6 % low. A made log
has too few and too large tensors to be replayed.
Source: https://huggingface.co/docs/transformers/v4.20.1/en/perf_train_gpu_one
"""
UNCERTAINTY = 0.2
UNCERTAINTY_SOURCE = "ASSUMPTION: closed forms of activations, and a fixed share for the allocator"
FROZEN = 0.6
"""Of frozen layers, whose activations are counted as if they trained: 2.8 GiB against 1.1 traced, all but the
head frozen."""
FROZEN_SOURCE = "ASSUMPTION: frozen layers are taken to keep what trained ones do, up to 2.5 times too much"
QUANTIZED_TIME = 2.0
"""Of a step's time beside quantized weights: 22 ms against 62 traced."""
QUANTIZED_TIME_SOURCE = "ASSUMPTION: unpacking is not counted; a traced step took up to 2.8 times as long"
_MADE = dict.fromkeys(TRACED_TERMS, ("fixed + bytes a sample x micro_batch_size, of what is alive", SOURCE))


class FastJudge(EstimatingJudge):
    """Answers like EstimatingJudge, without the allocator's replay."""

    def __init__(self, problem: Problem, *, trace: Callable[[TraceRequest], Trace], rates: Rates) -> None:
        super().__init__(problem, trace=trace, rates=rates)
        self._asked: set[Strategy] = set()

    def least_played_bytes(self, strategy: Strategy) -> int:
        """Return the bound that needs no play, the first time that one like this is asked for.

        Here a play costs as much as the estimate; it pays where several micro-batches are too large.
        """
        alike = replace(strategy, micro_batch_size=None, gradient_accumulation_steps=None)
        if alike not in self._asked:
            self._asked.add(alike)
            return self.least_live_bytes(strategy)
        return super().least_played_bytes(strategy)

    def _num_trained(self, strategy: Strategy) -> int:
        return 0  # closed forms do not know each parameter

    def _estimate(self, setup: Setup) -> MemoryEstimate:
        engine = make_engine(setup, Tape())
        play(engine, sketch=True)
        phases = tuple(
            PhaseMemory(phase=peak.phase, terms=(*_terms(engine, peak), *self.outside))
            for peak in replay_live(engine.tape).peaks
        )
        return MemoryEstimate(
            phases=phases,
            uncertainty=FROZEN if setup.strategy.freeze else UNCERTAINTY,
            uncertainty_source=FROZEN_SOURCE if setup.strategy.freeze else UNCERTAINTY_SOURCE,
        )

    def _step_time(self, strategy: Strategy) -> StepTime | None:
        found = super()._step_time(strategy)
        if found is None or strategy.quantization is None:
            return found
        return replace(found, uncertainty=QUANTIZED_TIME, uncertainty_source=QUANTIZED_TIME_SOURCE)

    def _estimate_within(self, setup: Setup) -> MemoryEstimate | None:
        device = self._estimate(setup)
        return device if device.peak_bytes <= self._problem.device_bytes else None


def _terms(engine: Engine, peak: PhasePeak) -> tuple[Term, ...]:
    cache = Term(
        name="allocator cache",
        num_bytes=int(CACHE_SHARE * peak.live_bytes),
        holder=Holder.CACHE,
        formula=f"{CACHE_SHARE:.0%} of the live tensors",
        source="ASSUMPTION",
    )
    return (*tensor_terms(engine, peak, traced=_MADE), cache)
