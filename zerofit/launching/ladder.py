"""zerofit bench ladder: one strategy after another, each a launch of the same plain script for some steps."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.checking.engine import refuse
from zerofit.checking.rules import OF_RANKS
from zerofit.checking.situation import RankCounts, Situation
from zerofit.core.errors import UserError
from zerofit.core.observer import SILENT, Observer
from zerofit.core.strategy import Precision
from zerofit.launching.launch import check_launch
from zerofit.launching.nodes import on_this_node
from zerofit.launching.prepare import prepare_launch
from zerofit.launching.run_folder import LADDER_PREFIX, RUNS, check_run_dir
from zerofit.launching.rungs import (
    ON_MANY_RANKS,
    ON_ONE_RANK,
    baseline,
    climb,
    launch_flags,
    launch_settings,
    parse_rungs,
)
from zerofit.launching.trials import (
    NextTrial,
    TrialEnd,
    TrialPolicy,
    TrialResult,
    Trials,
    Tried,
    earlier_results,
    refusal,
    trial_key,
    trials_folder,
    try_each,
)
from zerofit.machine.versions import check_libraries
from zerofit.models.dimensions import check_sequence_length
from zerofit.models.find import probe_model
from zerofit.models.task import Task
from zerofit.planning.machine_from_flags import machine_of
from zerofit.planning.make_problem import problem_of
from zerofit.planning.options import Loop, MachineFlags, ModelFlags
from zerofit.planning.resolve import Verb, resolve
from zerofit.planning.run_spec import RunSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerofit.core.facts import Machine, ModelFacts
    from zerofit.core.plan import Plan
    from zerofit.launching.rungs import LadderRun, LadderStep, Rung
    from zerofit.launching.start import PlannedLaunch
    from zerofit.launching.trials import TrialKey
    from zerofit.planning.planner import Planner
    from zerofit.planning.search import EstimatedStrategy

SCRIPT = "zerofit.launching.ladder_script"
"""The module that each rung launches."""
GPU_MODEL, GPU_BATCH = "chinese-macbert-large", 32
"""The model and batch of the published ladder."""
CPU_MODEL, CPU_BATCH = "all-minilm-l6-v2", 8
"""A BERT of 23 M parameters. ASSUMPTION: a rung takes less than a minute on two cores."""
LENGTH = 128
"""Tokens per sample in the published ladder."""
GPU_TRIALS, CPU_TRIALS = TrialPolicy(), TrialPolicy(num_warm_up=1, num_timed=2)
"""ASSUMPTION: on the CPU a step takes seconds, and memory matters most."""
_INPUTS = {Task.IMAGE_CLASSIFICATION: "pixel_values", Task.SPEECH_SEQ2SEQ: "input_features"}
"""Main inputs of the tasks without tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRung:
    """One rung: its launch, and what came of it."""

    step: LadderStep
    launch: PlannedLaunch
    command: str
    """The `zerofit launch` line that trains like this."""
    result: TrialResult | None
    """None if it was not run."""
    shortage: str
    """Why it does not fit according to its prediction; empty if it does, and without a prediction."""

    @property
    def plan(self) -> Plan:
        """Its plan, with its prediction if there is one."""
        return self.launch.plan

    @property
    def samples_per_s(self) -> float | None:
        """Samples trained per second over all ranks; None if not measured."""
        if self.result is None or self.result.step_time_s is None:
            return None
        return self.step.run.batch_size * self.plan.topology.data_parallel_size / self.result.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """All rungs, in their order."""

    model: ModelFacts
    batch_size: int
    """Samples per optimizer step on each rank."""
    sequence_length: int
    """Tokens per sample, unless a rung changes it."""
    is_cumulative: bool
    """True if each rung is on top of those before it."""
    predicted_for: Machine | None
    """The node of the predictions; None without GPUs to predict for."""
    rungs: tuple[LadderRung, ...]
    trials: Trials

    @property
    def plan(self) -> Plan:
        """The plan of the first rung, whose ranks and machine are those of all."""
        return self.rungs[0].launch.plan

    @property
    def is_measured(self) -> bool:
        """True if any rung was measured."""
        return any(tried.result.end is TrialEnd.MEASURED for tried in self.trials.tried)


def measure_ladder(
    *,
    model: str | None = None,
    task: Task | None = None,
    rungs: str | None = None,
    is_cumulative: bool = True,
    batch_size: int | None = None,
    sequence_length: int = LENGTH,
    attention: str = "eager",
    num_warm_up: int | None = None,
    num_timed: int | None = None,
    budget_s: float | None = None,
    is_anew: bool = False,
    on_cpu: bool = False,
    gpus: str | None = None,
    num_processes: int | None = None,
    gpu_ids: str | None = None,
    hang_limit_s: float | None = None,
    run_dir: Path = RUNS,
    dry_run: bool = False,
    observer: Observer = SILENT,
) -> Ladder:
    """Launch one strategy after another on this node, and return what each needed beside its prediction.

    Each rung is a trial as in `zerofit tune`, of a plain script that trains a model with random weights. A
    change that fails is left out below; one that runs out of memory is not, since a following one may help.

    Args:
        model: a folder, a config.json, a hub id or a name of the catalog.
        task: of the model's head; None for the model's own.
        rungs: comma-separated names of rungs; None for the default of this number of ranks.
        is_cumulative: whether a rung is on top of those before it, or of the baseline.
        batch_size: samples per optimizer step on each rank.
        sequence_length: tokens per sample.
        attention: transformers' attn_implementation of the baseline.
        num_warm_up: untimed optimizer steps of each rung.
        num_timed: timed optimizer steps of each rung.
        budget_s: no rung starts later than this after the first.
        is_anew: True to repeat measurements of earlier starts.
        on_cpu: True to run on the CPU.
        gpus: with `on_cpu` or `dry_run`: GPUs to predict for.
        num_processes: number of ranks, by default one for each GPU.
        gpu_ids: GPUs of this node to use.
        hang_limit_s: as for `zerofit.launch`.
        run_dir: folder of all run folders.
        dry_run: True to run and predict nothing.
        observer: receives each rung.

    Raises:
        UserError: an argument is wrong, or nothing can run here.
    """
    named = None if rungs is None else parse_rungs(rungs)
    name = model or (CPU_MODEL if on_cpu else GPU_MODEL)
    base = baseline(
        batch_size=batch_size or (CPU_BATCH if on_cpu else GPU_BATCH),
        sequence_length=sequence_length,
        attention=attention,
    )
    check_libraries(observer)
    source = probe_model(name, task=task)
    _check_has_tokens(name, source.task)
    check_sequence_length(source.facts, sequence_length)
    _check_lengths(source.facts, climb(named or (), base, is_cumulative=is_cumulative))
    check_run_dir(run_dir)
    usual = CPU_TRIALS if on_cpu else GPU_TRIALS
    policy = replace(
        usual,
        num_warm_up=num_warm_up or usual.num_warm_up,
        num_timed=num_timed or usual.num_timed,
        budget_s=budget_s,
        is_anew=is_anew,
    )
    launches = _Launches(
        ModelFlags(model=name, task=source.task),
        num_steps=policy.num_warm_up + policy.num_timed,
        on_cpu=on_cpu,
        gpus=gpus,
        num_processes=num_processes,
        gpu_ids=gpu_ids,
        dry_run=dry_run,
        observer=observer,
    )
    first = launches.of(base)
    if named is None:
        named = parse_rungs(ON_MANY_RANKS if first.plan.topology.world_size > 1 else ON_ONE_RANK)
    folder = trials_folder(run_dir, f"{LADDER_PREFIX}{Path(name).name}", first, policy)
    way = _Way(named, base, launches, is_cumulative=is_cumulative)
    if dry_run:
        trials = way.refused(Trials(tried=(), folder=folder))
    else:
        trials = try_each(
            way.following,
            Trials(tried=way.kept(earlier_results(folder, policy)), folder=folder),
            policy,
            hang_limit_s=hang_limit_s,
            check=check_launch,
            observer=observer,
        )
    return Ladder(
        model=source.facts,
        batch_size=base.batch_size,
        sequence_length=sequence_length,
        is_cumulative=is_cumulative,
        predicted_for=launches.machine,
        rungs=way.rungs(trials),
        trials=trials,
    )


class _Launches:
    """The launch of each run, and its prediction."""

    def __init__(
        self,
        model: ModelFlags,
        *,
        num_steps: int,
        on_cpu: bool,
        gpus: str | None,
        num_processes: int | None,
        gpu_ids: str | None,
        dry_run: bool,
        observer: Observer,
    ) -> None:
        self._model, self._num_steps, self._dry_run = model, num_steps, dry_run
        self._observer = observer
        self.machine = None if gpus is None else machine_of(MachineFlags(gpus=gpus), num_nodes=1).machine
        """The node to predict for; None without GPUs."""
        if self.machine is not None:
            num_gpus = len(self.machine.gpus)
            num_processes = num_processes or num_gpus
            counts = RankCounts(
                world_size=num_processes,
                text=f"--num-processes {num_processes}",
                gpus_per_node=num_gpus,
                can_rehearse=False,
            )
            refuse(Situation(ranks=counts), rules=OF_RANKS)
        self._nodes: dict[str, Any] = {"num_processes": num_processes, "gpu_ids": gpu_ids}
        self._on_cpu, self._gpus = on_cpu, gpus
        self._made: dict[LadderRun, PlannedLaunch] = {}
        self._shortages: dict[LadderRun, str] = {}
        self._planners: dict[int, Planner] = {}

    def of(self, run: LadderRun) -> PlannedLaunch:
        """Return the launch of a run, whose flags fix all of its strategy."""
        if run not in self._made:
            spec = resolve(
                (SCRIPT, *self._arguments(run)),
                verb=Verb.LAUNCH,
                module=True,
                captures=False,
                on_cpu=self._on_cpu,
                gpus=None if self._on_cpu else self._gpus,
                dry_run=self._dry_run,
                observer=SILENT if self._made else self._observer,
                **self._nodes,
                **launch_settings(run),
            )
            launch = prepare_launch(on_this_node(spec), SILENT)
            workload = replace(launch.plan.workload, sequence_length=run.sequence_length)
            self._made[run] = replace(launch, plan=replace(launch.plan, workload=workload))
            if self.machine is None and not self._on_cpu:
                self.machine = launch.plan.machine
        return self._made[run]

    def command(self, run: LadderRun) -> str:
        """Return the line that launches a run."""
        flags = ["--cpu"] if self._on_cpu else ["--no-capture"]
        for name, value in self._nodes.items():
            flags += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        words = (*flags, *launch_flags(launch_settings(run)), "-m", SCRIPT, *self._arguments(run))
        return shlex.join(("zerofit", "launch", *words))

    def shortage(self, run: LadderRun) -> str:
        """Return why a run does not fit by its prediction; empty if it does, and without a prediction."""
        return self._shortages.get(run, "")

    def with_prediction(self, run: LadderRun) -> PlannedLaunch:
        """Return the launch of a run with its prediction, if there are GPUs to predict for."""
        launch = self.of(run)
        if self.machine is None:
            return launch
        try:
            found = self._predict(launch.plan, self.machine, run)
        except UserError as error:
            self._observer.say(f"no prediction: {error.summary}: {error.found}")
            return launch
        self._shortages[run] = found.shortage
        return replace(launch, plan=replace(launch.plan, estimate=found.estimate))

    def _predict(self, plan: Plan, machine: Machine, run: LadderRun) -> EstimatedStrategy:
        from zerofit.planning.planner import Planner  # these import many modules
        from zerofit.planning.subject import describe

        # The script's weights are in fp32, and it drops the outputs once it has the loss, as Trainer does.
        flags = replace(
            self._model, sequence_length=run.sequence_length, dtype=Precision.FP32, loop=Loop.TRAINER
        )
        subject = describe(flags, versions=plan.versions)
        planner = self._planners.get(run.sequence_length)
        planner = planner or Planner(subject, is_fast=False, observer=self._observer)
        self._planners[run.sequence_length] = planner  # with its traces
        problem = problem_of(
            RunSpec(options=flags, described=MachineFlags(gpus=self._gpus)),
            subject,
            machine=replace(machine, gpus=machine.gpus[: plan.topology.world_size]),
            versions=plan.versions,
            topology=replace(plan.topology, on_cpu=False),
        )
        return planner.estimate(problem, plan.strategy)

    def _arguments(self, run: LadderRun) -> list[str]:
        task = self._model.task
        words = ["--model", str(self._model.model), *(["--task", task.value] if task else [])]
        words += ["--batch-size", str(run.batch_size), "--seq-len", str(run.sequence_length)]
        words += ["--steps", str(self._num_steps)]
        return [*words, "--reload"] if run.strategy.quantization is not None else words


class _Way:
    """The way up the ladder, which depends on what failed so far."""

    def __init__(
        self, rungs: Sequence[Rung], base: LadderRun, launches: _Launches, *, is_cumulative: bool
    ) -> None:
        self._rungs, self._base, self._launches = rungs, base, launches
        self._is_cumulative = is_cumulative

    def steps(self, results: Mapping[TrialKey, TrialResult]) -> tuple[LadderStep, ...]:
        """Return the rungs with their settings; changes that failed are left out below."""

        def has_failed(run: LadderRun) -> bool:
            found = results.get(self._key(run))
            return found is not None and found.end is TrialEnd.FAILED

        return climb(self._rungs, self._base, is_cumulative=self._is_cumulative, is_left_out=has_failed)

    def kept(self, known: Mapping[TrialKey, TrialResult]) -> tuple[Tried, ...]:
        """Return the trials of an earlier start that need not be run again; failures are."""
        runs = {self._key(step.run): step.run for step in (*self.steps({}), *self.steps(known))}
        return tuple(
            Tried(launch=self._launches.with_prediction(run), result=known[key], is_kept=True)
            for key, run in runs.items()
            if key in known and known[key].end is not TrialEnd.FAILED
        )

    def refused(self, trials: Trials) -> Trials:
        """Return failed trials for the rungs that a rule forbids, without running any."""
        for number in range(len(self._rungs)):
            launch = self._launches.of(self.steps(_results(trials))[number].run)
            if cause := refusal(launch, check_launch):
                result = TrialResult(end=TrialEnd.FAILED, cause=cause)
                tried = Tried(launch=launch, result=result, is_kept=False)
                trials = replace(trials, tried=(*trials.tried, tried))
        return trials

    def following(self, trials: Trials) -> NextTrial | None:
        """Return the first rung that was not tried; None if there is none."""
        results = _results(trials)
        for number, step in enumerate(self.steps(results), 1):
            if self._key(step.run) not in results:
                name = f"rung {number} of {len(self._rungs)}"
                launch = self._launches.with_prediction(step.run)
                return NextTrial(launch=launch, name=name, words=step.label)
        return None

    def rungs(self, trials: Trials) -> tuple[LadderRung, ...]:
        """Return all rungs with their trials."""
        of_key = {trial_key(tried.plan): tried for tried in trials.tried}
        found = []
        for step in self.steps(_results(trials)):
            tried = of_key.get(self._key(step.run))
            found.append(
                LadderRung(
                    step=step,
                    launch=self._launches.of(step.run) if tried is None else tried.launch,
                    command=self._launches.command(step.run),
                    result=None if tried is None else tried.result,
                    shortage=self._launches.shortage(step.run),
                )
            )
        return tuple(found)

    def _key(self, run: LadderRun) -> TrialKey:
        return trial_key(self._launches.of(run).plan)


def _results(trials: Trials) -> dict[TrialKey, TrialResult]:
    return {trial_key(tried.plan): tried.result for tried in trials.tried}


def _check_has_tokens(name: str, task: Task) -> None:
    if task in _INPUTS:
        raise UserError(
            "ladder-needs-tokens",
            "the ladder only supports models with tokens",
            found=f"--model {name}, whose inputs are {_INPUTS[task]}, labels",
            why="its rungs and results are based on tokens",
            fix="name a text model",
        )


def _check_lengths(facts: ModelFacts, steps: Sequence[LadderStep]) -> None:
    """Check that the model has positions for each rung's samples; the error names the rung."""
    for step in steps:
        try:
            check_sequence_length(facts, step.run.sequence_length)
        except UserError as error:
            raise UserError(
                error.rule,
                error.summary,
                found=f"--rungs with {step.rung.name} and the model {facts.name}",
                why=error.why,
                fix=f"name length-{facts.max_sequence_length} or less",
            ) from None
