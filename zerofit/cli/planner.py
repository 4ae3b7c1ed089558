"""Planner: one subject's traces and estimates for the verbs that plan, with progress shown on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Self

from zerofit.allocation_log import Trace
from zerofit.cli.kept_estimates import KeptEstimates
from zerofit.cli.library_versions import check_libraries_of_traces
from zerofit.estimate.closed_form import closed_form_log
from zerofit.planning.fast_judge import FastJudge
from zerofit.planning.judge import EstimatingJudge
from zerofit.planning.solve import solve
from zerofit.probe.gpu_catalog import load_gpus
from zerofit.probe.rates import catalog_rates, probe_rates

if TYPE_CHECKING:
    from zerofit.allocation_log import TraceRequest
    from zerofit.cli.subject import Subject
    from zerofit.planning.answer import Answer
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import Judge
    from zerofit.rates import Rates

DOES_NOT_FIT = 1
"""Exit code where no strategy fits."""


class Planner:
    """Plans for one subject; a context in which progress is shown.

    Args:
        subject: what is planned for.
        is_fast: whether closed forms take the place of traces.
    """

    def __init__(self, subject: Subject, *, is_fast: bool) -> None:
        self._subject = subject
        self._is_fast = is_fast
        self._progress: Any = None
        self._made: dict[tuple[TraceRequest, bool], Trace] = {}
        self._kept: list[KeptEstimates] = []

    def __enter__(self) -> Self:
        if not self._is_fast:
            check_libraries_of_traces()
        if not self._is_fast and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        for kept in self._kept:
            kept.write()

    def answer(self, problem: Problem, *, is_here: bool, notes: tuple[str, ...] = ()) -> Answer:
        """Return the plan of a problem.

        Args:
            problem: what is to be planned.
            is_here: whether its machine is this one, for which there may be measured rates.
            notes: what was assumed of it.
        """
        rates = probe_rates(problem.machine) if is_here else catalog_rates()
        return solve(
            problem,
            judge_of=lambda one: self._judge(one, rates),
            quick_judge_of=None
            if self._is_fast
            else lambda one: FastJudge(one, trace=self._closed_form, rates=rates),
            gpus=tuple(gpu.spec for gpu in load_gpus()),
            is_fast=self._is_fast,
            notes=(*notes, *self._subject.notes, *self._unchecked(problem)),
        )

    def _unchecked(self, problem: Problem) -> tuple[str, ...]:
        """Return what of the request names parts of the model, which closed forms do not know."""
        request = problem.request
        lora = request.lora or request.allowed_lora
        said = [f"--freeze {','.join(request.freeze)}"] if request.freeze else []
        if lora is not None and lora.target_modules:
            said.append(f"--lora-targets {','.join(lora.target_modules)}")
        if lora is not None and lora.modules_to_save:
            said.append(f"--lora-modules-to-save {','.join(lora.modules_to_save)}")
        if not self._is_fast or not said:
            return ()
        return (f"{' and '.join(said)} is in the model: --fast does not look, and a plan without it does",)

    def _judge(self, problem: Problem, rates: Rates) -> Judge:
        if self._is_fast:
            return FastJudge(problem, trace=self._closed_form, rates=rates)
        kept = KeptEstimates(problem, self._subject.identity)
        self._kept.append(kept)
        return EstimatingJudge(problem, trace=self._traced, rates=rates, devices=kept.estimates)

    def _closed_form(self, request: TraceRequest) -> Trace:
        key = request, True
        if key not in self._made:
            log = closed_form_log(self._subject.facts, request)
            self._made[key] = Trace(request=request, logs=(log,))
        return self._made[key]

    def _traced(self, request: TraceRequest) -> Trace:
        key = request, False
        if key not in self._made:
            kind = "with checkpointing" if request.gradient_checkpointing else "without checkpointing"
            title = f"tracing {self._subject.name} {kind}"
            task = self._progress.add_task(title, total=None) if self._progress else None

            def tell(what: str) -> None:
                if task is not None:
                    self._progress.update(task, description=f"{title}: {what}")

            self._made[key] = self._subject.trace(request, on_progress=tell)
            if task is not None:
                self._progress.remove_task(task)
        return self._made[key]
