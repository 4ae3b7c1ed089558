"""A regret question's grid: zerofit's choice, and every strategy that it is measured against."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from measuring.predict import STAND_IN

from gpu_truth.cases import model_path
from gpu_truth.results import Rule
from zerofit.core.facts import Workload
from zerofit.core.plan import Topology
from zerofit.core.strategy import Buckets
from zerofit.core.units import format_bytes
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.models.find import probe_model
from zerofit.models.task import Task
from zerofit.models.trace import trace_model
from zerofit.models.trace.cache import default_cache_folder
from zerofit.planning.candidates import candidates
from zerofit.planning.estimate.device_memory.non_torch_memory import non_torch_terms
from zerofit.planning.plan_labels import batch, label
from zerofit.planning.problem import Problem
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.search import OFFLOAD_TIER, tier
from zerofit.planning.solve import best_of
from zerofit.planning.subject import Subject
from zerofit.planning.training_estimator import TrainingEstimator

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpu_truth.results import RegretResult
    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.core.facts import GpuSpec, Machine, Versions
    from zerofit.core.rates import Rates
    from zerofit.core.strategy import Strategy
    from zerofit.models.source import ModelSource

FAR = 1.25
"""A strategy whose least memory is so many times the limit is not run.

ASSUMPTION: about three times the worst error of published runs on one GPU
(zerofit/planning/estimate/device_memory/memory.py). No measurement bounds the error of others, so that one
that is left out may have fitted.
"""
SLOW = 4.0
"""A strategy that is predicted to take so many times as long as the choice is not run.

ASSUMPTION, to spare the budget: nothing bounds the error of a predicted time. The fastest strategy that is
left out of each kind runs as a check.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model to be trained within a limit of memory."""

    key: str
    """Its name, unique among the questions."""
    model: str
    """A name of the catalog, or of a config beside the cases."""
    task: str
    sequence_length: int
    """Tokens of a sample."""
    global_batch_size: int
    """Samples of an optimizer step."""
    limit_bytes: int
    """What torch may allocate."""

    def is_of(self, result: RegretResult) -> bool:
        """Return True if a result answers this very question: one of the same key may be of an older one."""
        return all(getattr(self, one.name) == getattr(result, one.name) for one in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A strategy of the grid."""

    strategy: Strategy
    predicted_s: float | None
    """Time of an optimizer step; None where the machine's rates are not known."""
    predicted_bytes: int | None = None
    """What torch's allocator is predicted to hold at its peak; None where it is not run."""
    rule: Rule | None = None
    """That by which it is not run; None where it is."""
    why: str = ""
    """What the rule found, also where it runs as a check on the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is measured for one question."""

    choice: Strategy | None
    """What zerofit's plan takes; None where it says that nothing fits."""
    entries: tuple[Entry, ...]
    """All other strategies with the same mathematics and number format, the fastest by prediction first."""
    choice_bytes: int | None = None
    """What torch's allocator is predicted to hold at the choice's peak."""


def make_grid(question: Question, *, machine: Machine, versions: Versions, rates: Rates) -> Grid:
    """Return the plan's choice and what it is measured against.

    The grid is what the planner itself considers for one rank (engines, offload, checkpointing, torch's
    optimizers, every micro-batch) without what changes the mathematics: 8-bit states, Adafactor, freezing and
    adapters. NVMe disks are left aside. Rules thin it; of each kind (engine and what it offloads) the fastest
    that a rule leaves out runs all the same, as a check on the rules, where its least memory is within the
    limit.

    Args:
        question: what is asked.
        machine: this one; where it has no GPU, STAND_IN is planned for.
        versions: of what runs.
        rates: what the machine achieves.

    Raises:
        UserError: the model can't be planned.
    """
    source = probe_model(model_path(question.model), task=Task(question.task))
    problem = problem_of(question, source=source, machine=machine, versions=versions)
    estimator = _estimator(problem, source, rates)
    best = best_of(problem, lambda _: estimator)
    choice = best.strategy if best else None
    alike = [one for one in candidates(problem).strategies if tier(one) <= OFFLOAD_TIER and one != choice]
    found = [_entry(one, choice, estimator, question) for one in alike]
    entries = _with_checks(sorted(found, key=lambda one: one.predicted_s or 0.0), estimator, question)
    return Grid(
        choice=choice,
        choice_bytes=_peak_bytes(choice, estimator) if choice else None,
        entries=tuple(
            one if one.rule else replace(one, predicted_bytes=_peak_bytes(one.strategy, estimator))
            for one in entries
        ),
    )


def problem_of(question: Question, *, source: ModelSource, machine: Machine, versions: Versions) -> Problem:
    """Return the problem as a user would pose it: a GPU of that memory, and nothing else said.

    torch may hold `limit_bytes`: set_per_process_memory_fraction counts what its allocator has reserved, and
    nothing else. A GPU that leaves as much to torch has so much more as lies outside the allocator, the CUDA
    context above all. Of that GPU the plan takes all but the planner's usual reserve: the throughput that
    the reserve costs is part of the regret.

    Args:
        question: what is asked.
        source: its model.
        machine: whose first GPU is cut down.
        versions: of what runs.
    """
    topology = Topology()
    gpu = machine.gpus[0] if machine.gpus else find_gpu(STAND_IN)
    outside = sum(term.num_bytes for term in non_torch_terms(gpu, topology, versions))
    samples = Workload(global_batch_size=question.global_batch_size, sequence_length=question.sequence_length)
    facts = source.facts
    return Problem(
        spec=RunSpec(),
        subject=Subject(said=facts.name, name=facts.name, facts=facts, samples=samples),
        machine=replace(machine, gpus=(_cut(gpu, question.limit_bytes + outside),), nvme_bytes=0),
        topology=topology,
        workload=samples,
        versions=versions,
    )


def name_of(strategy: Strategy) -> str:
    """Return a strategy in a few words: "one GPU, checkpointing, fused AdamW, 8 x 4"."""
    return f"{label(strategy, Topology())}, {batch(strategy)}"


def _cut(gpu: GpuSpec, memory_bytes: int) -> GpuSpec:
    return replace(gpu, memory_bytes=memory_bytes, reserved_bytes=0)


def _estimator(problem: Problem, source: ModelSource, rates: Rates) -> TrainingEstimator:
    folder = default_cache_folder(os.environ, Path.home())

    def trace(request: TraceRequest) -> Trace:
        return trace_model(source, request, cache_folder=folder)

    return TrainingEstimator(problem, trace=trace, rates=rates)


def _entry(
    strategy: Strategy, choice: Strategy | None, estimator: TrainingEstimator, question: Question
) -> Entry:
    seconds = estimator.seconds(strategy)
    rule, why = _left_out(strategy, choice, estimator, question) or (None, "")
    return Entry(strategy=strategy, predicted_s=seconds, rule=rule, why=why)


def _left_out(
    strategy: Strategy, choice: Strategy | None, estimator: TrainingEstimator, question: Question
) -> tuple[Rule, str] | None:
    """Return why a strategy is not run, by the rules that thin every grid; None where it is."""
    least = _least_bytes(strategy, estimator)
    if least > FAR * question.limit_bytes:
        times = least / question.limit_bytes
        return Rule.FAR, f"predicted to need {format_bytes(least)} at least, {times:.1f} x the limit"
    if not estimator.fits_host(strategy):
        return Rule.HOST, "predicted to need more host memory than there is"
    with_large = replace(strategy, buckets=Buckets())
    if strategy != with_large and _least_bytes(with_large, estimator) <= question.limit_bytes:
        return Rule.BUCKETS, "differs in the size of its buckets alone from one that may fit"
    own, chosen = estimator.seconds(strategy), estimator.seconds(choice) if choice else None
    if own is not None and chosen is not None and own > SLOW * chosen:
        return Rule.SLOW, f"predicted to take {own / chosen:.0f} x as long as the choice"
    return None


def _with_checks(
    entries: Iterable[Entry], estimator: TrainingEstimator, question: Question
) -> Iterator[Entry]:
    """Yield entries, of each kind the first that is left out and may fit as one that runs."""
    checked = set()
    for one in entries:
        strategy = one.strategy
        kind = strategy.engine, strategy.optimizer_offload, strategy.param_offload
        may_run = one.rule in (Rule.BUCKETS, Rule.SLOW) and kind not in checked
        if may_run and _least_bytes(strategy, estimator) <= question.limit_bytes:
            checked.add(kind)
            yield replace(one, rule=None)
        else:
            yield one


def _least_bytes(strategy: Strategy, estimator: TrainingEstimator) -> int:
    """Return what torch's allocator needs at least, by the planner's own bounds."""
    return max(estimator.least_live_bytes(strategy), estimator.least_played_bytes(strategy)) - _outside_bytes(
        estimator
    )


def _peak_bytes(strategy: Strategy, estimator: TrainingEstimator) -> int:
    """Return what torch's allocator is estimated to hold at the peak."""
    return estimator.estimate(strategy).estimate.device.peak_bytes - _outside_bytes(estimator)


def _outside_bytes(estimator: TrainingEstimator) -> int:
    return sum(term.num_bytes for term in estimator.outside)
