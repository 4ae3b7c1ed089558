"""Planner: plans for one subject on several machines, tracing its model once."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import Trace
from zerofit.core.errors import UserError
from zerofit.machine.gpu_catalog import load_gpus
from zerofit.machine.observations import read_observations
from zerofit.machine.rates import catalog_rates, probe_rates
from zerofit.machine.versions import check_libraries_of_traces
from zerofit.planning.answer_lines import as_it_is_words
from zerofit.planning.closed_form_estimator import ClosedFormEstimator
from zerofit.planning.estimate.closed_form.log import closed_form_log
from zerofit.planning.evaluation import with_evaluation
from zerofit.planning.observed_runs import ObservedRuns
from zerofit.planning.solve import files_as_they_say, solve
from zerofit.planning.training_estimator import TrainingEstimator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.core.allocation_log import AllocationLog, Sharding, TraceRequest
    from zerofit.core.observer import Observer
    from zerofit.core.rates import Rates
    from zerofit.core.strategy import Strategy
    from zerofit.machine.observations import Observation
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import EstimatedStrategy
    from zerofit.planning.solve import Answer, EstimatorOf
    from zerofit.planning.subject import Subject

_NOT_TRACED = ("trace-broken", "trace-failed", "trace-not-affine", "trace-unknown-inputs")
"""Errors of models that can't be traced but may still be estimated by their dimensions."""


class Planner:
    """Plans for one subject; each trace is made once."""

    def __init__(self, subject: Subject, *, is_fast: bool, observer: Observer) -> None:
        self._subject = subject
        assert subject.tracer is not None
        self._trace = subject.tracer
        self._is_fast = is_fast
        self._observer = observer
        self._traces: dict[tuple[TraceRequest, bool], Trace] = {}
        self._has_traced = False
        self._observations: tuple[Observation, ...] = ()
        if not self._is_fast:
            check_libraries_of_traces()

    def answer(
        self,
        problem: Problem,
        *,
        num_fastest: int = 0,
        learns: bool = True,
        compares_layouts: bool = False,
        screens: bool = False,
    ) -> Answer:
        """Return the plan of a problem.

        Args:
            num_fastest: how many of the fastest that fit to return beside the choice.
            learns: False to ignore observations of earlier runs on this machine.
            compares_layouts: True to compare all layouts.
            screens: True if the answer must say what closed forms leave open, if these are used.

        Raises:
            UserError: the model can't be traced, or is to be estimated by dimensions that its config lacks.
        """
        if self._is_fast and problem.script is None and not problem.model.hidden_size:
            raise _no_dimensions(problem.model.name)
        is_here, specified = problem.spec.is_here, problem.spec.machine
        rates = probe_rates(problem.machine) if is_here else catalog_rates()
        self._observations = ()
        if learns and is_here and problem.script is not None:
            self._observations = read_observations()
        observed = ObservedRuns(problem, self._observations).notes
        assumed = specified.assumptions if specified is not None else ()
        notes = (*assumed, *self._subject.notes, *self._unchecked(problem), *observed)
        solved = partial(
            self._solve, problem, rates, num_fastest=num_fastest, compares_layouts=compares_layouts
        )
        try:
            answer = solved(is_fast=self._is_fast, screens=self._is_fast and screens)
        except UserError as error:
            in_stages = problem.topology.pipeline_parallel_size > 1
            is_known = problem.model.num_layers and problem.model.hidden_size
            if error.rule not in _NOT_TRACED or not is_known or in_stages:
                raise
            why = f"the model can't be traced ({error.found}): estimated by its dimensions, as with --fast"
            notes = (*notes, why)
            answer = solved(is_fast=True, screens=False)
        left_out = dict.fromkeys(note for trace in self._traces.values() for note in trace.notes)
        return replace(answer, notes=(*notes, *answer.notes, *left_out))

    def estimate(self, problem: Problem, strategy: Strategy) -> EstimatedStrategy:
        """Return one strategy of a problem with its estimate, whether it fits or not."""
        rates = probe_rates(problem.machine) if problem.spec.is_here else catalog_rates()
        return TrainingEstimator(problem, trace=self._traced, rates=rates).estimate(strategy)

    def _solve(
        self,
        problem: Problem,
        rates: Rates,
        *,
        num_fastest: int,
        compares_layouts: bool,
        is_fast: bool,
        screens: bool,
    ) -> Answer:
        def estimators(
            kind: Callable[..., TrainingEstimator], trace: Callable[[TraceRequest], Trace]
        ) -> EstimatorOf:
            return lambda problem: kind(
                problem, trace=trace, rates=rates, observed_runs=ObservedRuns(problem, self._observations)
            )

        in_stages = problem.topology.pipeline_parallel_size > 1
        tracing = partial(TrainingEstimator, trace_ahead=self._trace_ahead)
        closed_forms = estimators(partial(ClosedFormEstimator, stands_in=not is_fast), self._closed_form)
        answer = solve(
            problem,
            estimator_of=closed_forms if is_fast else estimators(tracing, self._traced),
            quick_estimator_of=None if is_fast or in_stages else closed_forms,
            gpus=tuple(gpu.spec for gpu in load_gpus()),
            num_fastest=num_fastest,
            compares_layouts=compares_layouts,
            screens=screens,
            on_nothing_fits=self._say_nothing_fits,
            on_own=self._say_own,
        )
        if not is_fast:
            answer = with_evaluation(answer, estimators(TrainingEstimator, self._traced)(answer.problem))
        elif problem.script is not None and problem.script.capture.evaluation is not None:
            answer = replace(answer, notes=(*answer.notes, "memory of evaluation is not counted by --fast"))
        return replace(answer, is_fast=is_fast)

    def _say_own(self, problem: Problem, own: EstimatedStrategy) -> None:
        """Tell what the unchanged script needs as soon as it is known, if the rest takes as long again."""
        if self._has_traced:
            said = as_it_is_words(own, problem, has_files=files_as_they_say(problem) is not None)
            self._observer.say(f"{said}; looking for what fits and is faster ...")

    def _say_nothing_fits(self, problem: Problem, own: EstimatedStrategy | None) -> None:
        if not self._is_fast:
            self._observer.say("nothing fits: looking for the smallest changes with which it does ...")

    def _unchecked(self, problem: Problem) -> tuple[str, ...]:
        """Return a note if --fast can't check names of modules and parameters that the user gave."""
        lora = problem.said.get("lora") or problem.spec.options.allowed_lora
        frozen = problem.said.get("freeze")
        said = [f"--freeze {','.join(frozen)}"] if frozen else []
        if lora is not None and lora.target_modules:
            said.append(f"--lora-targets {','.join(lora.target_modules)}")
        if lora is not None and lora.modules_to_save:
            said.append(f"--lora-modules-to-save {','.join(lora.modules_to_save)}")
        if not self._is_fast or not said:
            return ()
        return (f"{' and '.join(said)} can't be checked with --fast: plan without it to check the names",)

    def _closed_form(self, request: TraceRequest) -> Trace:
        key = request, True
        if key not in self._traces:
            log = closed_form_log(self._subject.facts, request)
            if self._subject.capture is not None:
                log = _with_rows(log, self._subject.capture.rows_per_sample)
            self._traces[key] = Trace(request=request, logs=(log,))
        return self._traces[key]

    def _traced(self, request: TraceRequest) -> Trace:
        key = request, False
        if key not in self._traces:
            kind = "with checkpointing" if request.gradient_checkpointing else "without checkpointing"
            kind = "in evaluation" if request.evaluates else kind
            if request.sharding is not None:
                kind = f"{_under_fsdp2(request.sharding)} {kind}"
            if request.pipeline_parallel_size > 1:
                kind = f"part {request.pipeline_place} of {request.pipeline_parallel_size} {kind}"
            with self._observer.task(f"tracing {self._subject.name} {kind}") as tell:
                self._traces[key] = self._trace(request, partial(self._tell, tell))
        return self._traces[key]

    def _tell(self, tell: Callable[[str], None], progress: str) -> None:
        """Tell the progress of a trace, which is then not read from the cache."""
        self._say_traced()
        tell(progress)

    def _say_traced(self) -> None:
        """Say once that a model is traced; of a script it was said that it runs."""
        if not self._has_traced and self._subject.capture is None:
            self._observer.announce(f"tracing {self._subject.name}; the next plan of it is quicker")
        self._has_traced = True

    def _trace_ahead(self, requests: Sequence[TraceRequest]) -> None:
        # Threads, as a notebook has them, are not in the forks that trace.
        if self._subject.tracer_ahead is None or len(requests) < 2 or threading.active_count() > 1:
            return
        with self._observer.task(f"tracing {self._subject.name} in {len(requests)} ways"):
            self._subject.tracer_ahead(requests, self._say_traced)


def _no_dimensions(name: str) -> UserError:
    return UserError(
        "model-config-incomplete",
        "--fast needs dimensions that the model's config does not have",
        found=f"--fast with --model {name}, whose blocks have several widths, or keys of their own",
        why="closed forms count blocks of one width",
        fix="leave out --fast: the model is then traced",
    )


def _under_fsdp2(sharding: Sharding) -> str:
    words = ["under FSDP2", "" if sharding.reshard_after_forward else "without resharding"]
    words += ["with offload" if sharding.cpu_offload else ""]
    words += [f"in {sharding.micro_batches} micro-batches" if sharding.micro_batches > 1 else ""]
    return " ".join(filter(None, words))


def _with_rows(log: AllocationLog, rows_per_sample: int) -> AllocationLog:
    """Return the log for samples of several rows each."""
    storages, costs = log.storages, log.costs
    return replace(
        log,
        storages=replace(
            storages, bytes_per_sample=tuple(number * rows_per_sample for number in storages.bytes_per_sample)
        ),
        costs=tuple(
            replace(
                cost,
                flops_per_sample=cost.flops_per_sample * rows_per_sample,
                bytes_per_sample=cost.bytes_per_sample * rows_per_sample,
            )
            for cost in costs
        ),
    )
