"""The estimator by closed forms, for `plan --fast` and to preselect what is traced."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, Term
from zerofit.core.strategy import Engine, ZeroStage
from zerofit.planning.estimate.closed_form.log import CLOSED_FORM_SOURCE
from zerofit.planning.estimate.closed_form.uncertainty import closed_form_uncertainty
from zerofit.planning.estimate.device_memory.memory import fullest_ranks, play_strategy, tensor_terms
from zerofit.planning.estimate.device_memory.replay import replay_live
from zerofit.planning.estimate.engines.engine import TRACED_TERMS, Setup
from zerofit.planning.estimate.engines.fsdp2 import fsdp2_needs_trace
from zerofit.planning.search import EngineRefusedError
from zerofit.planning.training_estimator import TrainingEstimator

if TYPE_CHECKING:
    from zerofit.core.allocation_log import AllocationLog
    from zerofit.core.estimates import StepTime
    from zerofit.core.facts import ModelFacts
    from zerofit.core.strategy import Strategy
    from zerofit.planning.estimate.device_memory.replay import TapePeak
    from zerofit.planning.estimate.engines.engine import SimulatedEngine
    from zerofit.planning.problem import Problem

CACHE_SHARE = 0.06
"""Share of the live tensors that the allocator reserves beyond them.

ASSUMPTION: in nine published BERT-large runs live tensors and context alone were 1.4 to 6 % low. The tensors
of a closed-form log are too few and too large for a replay.
Source: https://huggingface.co/docs/transformers/v4.20.1/en/perf_train_gpu_one
"""
QUANTIZED_TIME = 2.0
"""Uncertainty of a step's time with quantized weights: 22 ms against 62 traced."""
QUANTIZED_TIME_SOURCE = "ASSUMPTION: unpacking is not counted; a traced step took up to 2.8 times as long"
_MADE = dict.fromkeys(
    TRACED_TERMS, ("live tensors: fixed + bytes per sample x micro_batch_size", CLOSED_FORM_SOURCE)
)


class ClosedFormEstimator(TrainingEstimator):
    """A TrainingEstimator without the allocator's replay.

    Args:
        stands_in: True to count FSDP2, which has no closed form, as ZeRO-3: to preselect what is traced.
    """

    def __init__(self, problem: Problem, *, stands_in: bool = False, **known: Any) -> None:
        super().__init__(problem, **known)
        self._stands_in = stands_in
        self._seen: set[Strategy] = set()

    def least_played_bytes(self, strategy: Strategy) -> int:
        """Return the bound; at the first call for a strategy without its batch, the cheaper live bound.

        Here the simulation costs as much as an estimate, and pays if several micro-batches are too large.
        """
        alike = replace(strategy, micro_batch_size=None, gradient_accumulation_steps=None)
        if alike not in self._seen:
            self._seen.add(alike)
            return self.least_live_bytes(strategy)
        return super().least_played_bytes(strategy)

    def is_known(self, strategy: Strategy) -> bool:
        return True

    def _log(self, strategy: Strategy, stage: int = -1) -> AllocationLog:
        return super()._log(self._stand_in(strategy), stage)

    def _setup_of(self, log: AllocationLog, strategy: Strategy, stage: int = -1) -> Setup:
        return super()._setup_of(log, self._stand_in(strategy), stage)

    def _host_setup(self, strategy: Strategy) -> Setup:
        """Return FSDP2's own: ZeRO-3 partitions on the host what FSDP2 has whole on each rank."""
        setup = super()._host_setup(strategy)
        return replace(setup, strategy=strategy) if strategy.engine is Engine.FSDP2 else setup

    def _stand_in(self, strategy: Strategy) -> Strategy:
        if strategy.engine is not Engine.FSDP2:
            return strategy
        if not self._stands_in:
            raise EngineRefusedError(Engine.FSDP2, fsdp2_needs_trace())
        return replace(strategy, engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS)

    def _num_trained(self, strategy: Strategy) -> int:
        return 0  # closed forms do not know each parameter

    def _estimate(self, setup: Setup) -> MemoryEstimate:
        return closed_form_memory(setup, self.outside, model=self._problem.model)

    def _predicted_step_time(self, strategy: Strategy) -> StepTime | None:
        found = super()._predicted_step_time(strategy)
        if found is None or strategy.quantization is None:
            return found
        return replace(found, uncertainty=QUANTIZED_TIME, uncertainty_source=QUANTIZED_TIME_SOURCE)

    def _as_reserved(self, strategy: Strategy, device: MemoryEstimate) -> MemoryEstimate:
        return device  # without the allocator

    def _estimate_within(self, setup: Setup) -> MemoryEstimate | None:
        device = self._estimate(setup)
        return device if device.peak_bytes <= self._problem.device_bytes else None


def closed_form_memory(setup: Setup, outside: tuple[Term, ...], *, model: ModelFacts) -> MemoryEstimate:
    """Return the memory of one GPU by a closed-form log, without the allocator's replay.

    Args:
        setup: with the log of closed_form_log.
        outside: memory outside PyTorch (non_torch_terms).
        model: the model, whose family decides how certain closed forms are.
    """
    uncertainty, source = closed_form_uncertainty(setup.strategy, model)
    found: list[MemoryEstimate] = []
    for rank in fullest_ranks(setup):
        engine = play_strategy(rank, sketch=True)
        phases = tuple(
            PhaseMemory(phase=peak.phase, terms=(*_terms(engine, peak), *outside))
            for peak in replay_live(engine.tape).peaks
        )
        found.append(MemoryEstimate(phases=phases, uncertainty=uncertainty, uncertainty_source=source))
    return max(found, key=lambda memory: memory.peak_bytes)


def _terms(engine: SimulatedEngine, peak: TapePeak) -> tuple[Term, ...]:
    cache = Term(
        name="allocator cache",
        num_bytes=int(CACHE_SHARE * peak.live_bytes),
        holder=Holder.CACHE,
        formula=f"{CACHE_SHARE:.0%} of the live tensors",
        source="ASSUMPTION",
    )
    return (*tensor_terms(engine, peak, traced=_MADE), cache)
