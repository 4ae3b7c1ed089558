"""Regret: zerofit's plan under a memory limit, measured against all alternatives."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from measuring.results import TrialOutcome, TrialState

from gpu_truth import verdict
from gpu_truth.builds import is_compiled
from gpu_truth.grid import Grid, Question, make_grid
from gpu_truth.predictions import leave_alone
from gpu_truth.record import CUT_OFF, Record
from gpu_truth.runner import run_specs, spec_of
from gpu_truth.usual import case_of, start_trainer
from zerofit.core.errors import UserError
from zerofit.core.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Sequence

    from measuring.trial import RunningTrial

    from gpu_truth.results import RegretResult
    from zerofit.core.facts import Machine, Versions
    from zerofit.core.rates import Rates
    from zerofit.core.strategy import Strategy

QUESTIONS = (
    Question(
        key="bert-large-32x128-6g",
        model="bert-large-uncased",
        task="sequence-classification",
        sequence_length=128,
        global_batch_size=32,
        limit_bytes=6 * GIB,
    ),
    Question(
        key="bert-large-32x128-4g",
        model="bert-large-uncased",
        task="sequence-classification",
        sequence_length=128,
        global_batch_size=32,
        limit_bytes=4 * GIB,
    ),
    Question(
        key="gpt2-medium-16x512-10g",
        model="gpt2-medium",
        task="causal-lm",
        sequence_length=512,
        global_batch_size=16,
        limit_bytes=10 * GIB,
    ),
    Question(
        key="bert-large-32x128-10g",
        model="bert-large-uncased",
        task="sequence-classification",
        sequence_length=128,
        global_batch_size=32,
        limit_bytes=10 * GIB,
    ),
    Question(
        key="llama-1b-8x1024-16g",
        model="llama-3.2-1b",
        task="causal-lm",
        sequence_length=1024,
        global_batch_size=8,
        limit_bytes=16 * GIB,
    ),
    Question(
        key="llama-1b-8x1024-28g",
        model="llama-3.2-1b",
        task="causal-lm",
        sequence_length=1024,
        global_batch_size=8,
        limit_bytes=28 * GIB,
    ),
)
"""The most valuable first. As zerofit plans them for an H100, BERT-large recomputes at 6 GiB, offloads at 4
and runs plainly at 10; GPT-2 medium recomputes and accumulates at 10 GiB, as the Llama of 1B does at 28; at
16 GiB that one offloads."""
QUESTIONS_ON_CPU = (
    Question(
        key="minilm-1x64-1200m",
        model="all-minilm-l6-v2",
        task="sequence-classification",
        sequence_length=64,
        global_batch_size=1,
        limit_bytes=1200 * MIB,
    ),
)
"""ASSUMPTION: small enough for two cores; one sample a step leaves eight processes. The plan is for a GPU
that stands in; what is measured on the CPU shows that the harness runs, and says nothing of GPUs. What is
offloaded there counts for the limit, too."""
_LIMIT_S = 45.0
"""ASSUMPTION: a run of 7 steps that takes longer is none that anybody would choose."""
_LIMIT_ON_CPU_S = 120.0
"""ASSUMPTION: two cores that others use as well import and take 7 steps of a small model within that."""
_CORES_OF_ONE = 4
"""ASSUMPTION: one that plans leaves what is measured undisturbed where it has so many cores."""
_PLAN_LIMIT_S = 120.0
"""ASSUMPTION: a plan takes four traces, each of some seconds on one core; one that dies is not waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What one question is measured with."""

    folder: Path
    """Takes the files of its processes, and has none yet."""
    ends_at: float
    """By time.monotonic()."""
    lookahead: int
    """How many processes import while one runs."""
    on_cpu: bool
    has_cpu_adam: bool
    """True if what DeepSpeed compiles is there."""

    @property
    def limit_s(self) -> float:
        """How long one run may take."""
        return _LIMIT_ON_CPU_S if self.on_cpu else _LIMIT_S

    @property
    def left_s(self) -> float:
        """What is left of the budget."""
        return self.ends_at - time.monotonic()


def run_regret(
    *,
    questions: Sequence[Question],
    keep: Callable[[RegretResult], None],
    folder: Path,
    ends_at: float,
    lookahead: int,
    on_cpu: bool,
    machine: Machine,
    versions: Versions,
    rates: Rates,
    has_cpu_adam: bool,
    unplanned: Callable[[str], None],
    before: Collection[RegretResult] = (),
) -> tuple[str, ...]:
    """Measure the questions in turn, each with all that was tried, and return the keys of those cut off.

    One that the budget or Ctrl-C cuts off is kept with what was measured by then; what was not says so.

    Args:
        questions: the most valuable first.
        keep: given a question after each run, with all that is known, in the place of one of the same key.
        folder: takes the files of the processes.
        ends_at: when all ends, by time.monotonic().
        lookahead: how many processes import while one runs.
        on_cpu: whether they run on the CPU though there may be a GPU.
        machine: this one, with the one GPU that is cut down, or with none, for which another then stands in.
        versions: of what runs.
        rates: what the machine achieves.
        has_cpu_adam: whether what DeepSpeed compiles is there, without which nothing that needs it is run: no
            process may be ended while it compiles.
        unplanned: told of each question that can't be planned, and why.
        before: what earlier runs of the harness measured, which is not run again where its end stands.
    """
    left_over: list[str] = []
    plan = partial(_plan, machine=machine, versions=versions, rates=rates)
    with _planned(questions, plan, num_cores=machine.num_cpu_cores, ends_at=ends_at) as grids:
        for question, grid in zip(questions, grids, strict=True):
            if grid is None or isinstance(grid, str):
                if grid is not None:
                    unplanned(f"{question.key}: {grid}")
                left_over.append(question.key)
                continue
            files = Path(tempfile.mkdtemp(prefix=f"{question.key}-", dir=folder))
            means = Means(
                folder=files,
                ends_at=ends_at,
                lookahead=lookahead,
                on_cpu=on_cpu,
                has_cpu_adam=has_cpu_adam,
            )
            earlier = next((one for one in before if one.key == question.key), None)
            result = measure_question(question, grid, means, keep=keep, before=earlier)
            if verdict.is_cut_off(result):
                left_over.append(question.key)
    return tuple(left_over)


def measure_question(
    question: Question,
    grid: Grid,
    means: Means,
    *,
    keep: Callable[[RegretResult], None],
    before: RegretResult | None = None,
) -> RegretResult:
    """Measure what is left of a question, and return it with all that was tried by now.

    Args:
        question: what is asked.
        grid: what zerofit plans for it, and what that is measured against.
        means: where and how long.
        keep: given the question after each run, in the place of what it was given before.
        before: what an earlier run of the harness measured of it.
    """
    record = Record(question, grid, before)

    def put(take: Callable[[Strategy, TrialOutcome], None], one: tuple[Strategy, TrialOutcome]) -> None:
        take(*one)
        keep(record.result())

    def put_trainer(running: RunningTrial) -> None:
        outcome = _finished(running, means)
        if outcome is not CUT_OFF:
            record.put_trainer(outcome)
            keep(record.result())

    with ExitStack() as stack:
        trainer = None
        if record.lacks_trainer and means.left_s > 0:
            trainer = stack.enter_context(start_trainer(question, folder=means.folder, on_cpu=means.on_cpu))
        for one in stack.enter_context(closing(_run(question, record.left(), means))):
            put(record.put, one)
            if trainer is not None:
                put_trainer(trainer)
                trainer = None
        if trainer is not None:
            put_trainer(trainer)
    with closing(_run(question, record.repeats_left(), means, name="again-")) as ended:
        for one in ended:
            put(record.put_repeat, one)
    return record.result()


def _finished(running: RunningTrial, means: Means) -> TrialOutcome:
    """Return how a process ended that waits for its turn; one that the budget ended was not run."""
    left_s = means.left_s
    if left_s <= 0:
        return CUT_OFF
    outcome = running.finish(limit_s=min(means.limit_s, left_s))
    return CUT_OFF if outcome.state is TrialState.TOO_SLOW and left_s < means.limit_s else outcome


def _run(
    question: Question, strategies: Sequence[Strategy], means: Means, *, name: str = ""
) -> Generator[tuple[Strategy, TrialOutcome]]:
    """Yield how each ended that came to its turn; the name tells its files from those of its first run."""
    by_key = {f"{name}{number:02}": strategy for number, strategy in enumerate(strategies, 1)}
    refused: list[Strategy] = []

    def may_start(key: str) -> bool:
        if means.has_cpu_adam or not is_compiled(by_key[key], on_cpu=means.on_cpu):
            return True
        refused.append(by_key[key])
        return False

    specs = (
        (
            key,
            spec_of(
                case_of(question, strategy, key=key),
                on_cpu=means.on_cpu,
                memory_limit_bytes=question.limit_bytes,
            ),
        )
        for key, strategy in by_key.items()
    )
    ended = run_specs(
        specs,
        folder=means.folder,
        ends_at=means.ends_at,
        lookahead=means.lookahead,
        limit_s=means.limit_s,
        may_start=may_start,
    )
    for key, outcome, _ in ended:
        yield by_key[key], outcome
    if means.left_s > 0:
        yield from ((strategy, _NO_CPU_ADAM) for strategy in refused)


_NO_CPU_ADAM = TrialOutcome(state=TrialState.CANNOT_RUN, reason="DeepSpeed's CPU Adam could not be built")


def _plan(question: Question, *, machine: Machine, versions: Versions, rates: Rates) -> Grid | str:
    """Return the grid of a question, or why there is none: one question must not end the others."""
    try:
        return make_grid(question, machine=machine, versions=versions, rates=rates)
    except UserError as error:
        return f"{error.summary}: {error.why}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def _planned(
    questions: Sequence[Question],
    plan: Callable[[Question], Grid | str],
    *,
    num_cores: int,
    ends_at: float,
) -> Iterator[Iterator[Grid | str | None]]:
    """Plan in processes of their own, the next questions while one is measured; they end with the context.

    It yields None in the place of a plan that the budget did not suffice for.
    """
    processes = max(1, min(len(questions), num_cores // _CORES_OF_ONE))
    with multiprocessing.get_context("spawn").Pool(processes, initializer=leave_alone) as pool:
        planned = [pool.apply_async(plan, (one,)) for one in questions]

        def grids() -> Iterator[Grid | str | None]:
            for one in planned:
                left_s = max(0.0, ends_at - time.monotonic())
                try:
                    yield one.get(timeout=min(_PLAN_LIMIT_S, left_s))
                except multiprocessing.TimeoutError:
                    within = f"its plan was not there within {_PLAN_LIMIT_S:g} s"
                    yield within if left_s > _PLAN_LIMIT_S else None

        yield grids()
