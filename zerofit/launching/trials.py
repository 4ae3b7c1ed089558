"""Trials: launches that run for some steps each on this machine, and the choice of strategies to try."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zerofit.core.atomic_file import write_whole
from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.cache_folder import cache_folder
from zerofit.core.errors import UserError
from zerofit.core.estimates import Holder
from zerofit.core.json_text import parse_json
from zerofit.core.observer import SILENT
from zerofit.core.plan import Origin, Plan, Reason, TrialSteps
from zerofit.core.rank_record import read_record
from zerofit.core.secrets import masked
from zerofit.core.strategy import Buckets, Engine, Strategy, show
from zerofit.core.units import format_bytes
from zerofit.core.validation import check_at_least, parse_known
from zerofit.launching.diagnose import EndKind
from zerofit.launching.prepare import prepare_launches
from zerofit.launching.recover import wait_for_free_gpus
from zerofit.launching.run_folder import TUNE_PREFIX, RunFolder, fill_run_folder, make_folder
from zerofit.launching.start import launch_files, start, trial_step_time_s
from zerofit.machine.gpus import free_gpu_bytes
from zerofit.machine.observations import subject_of
from zerofit.machine.stopping import stopping_by_exception
from zerofit.planning.plan_labels import seconds, strategy_words
from zerofit.planning.search import TIME_TIE_SHARE
from zerofit.planning.sources.settings import plan_from_file
from zerofit.scripts.capture.environment import quiet_variables
from zerofit.scripts.capture.journal import REFUSED, SPEC
from zerofit.scripts.capture.leftovers import CaptureFolder, clear_leftovers, keep
from zerofit.scripts.capture.restore_files import places
from zerofit.scripts.target import script_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zerofit.core.observer import Observer
    from zerofit.launching.diagnose import RunEnd
    from zerofit.launching.start import PlannedLaunch
    from zerofit.planning.run_spec import RunSpec

_CANDIDATES_PER_TRIAL = 4
"""Strategies planned per trial: the results of the first ones decide which of them are tried."""
_OUT_OF_MEMORY = (EndKind.GPU_OUT_OF_MEMORY, EndKind.HOST_OUT_OF_MEMORY)
_RESULT = "result.json"
TrialKey = tuple[Strategy, int | None]
"""A trial's strategy, and its tokens per sample; None as the script sets them."""


class TrialEnd(StrEnum):
    """How a trial ended."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"
    """The script failed, or a rule forbids the strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPolicy:
    """Number and length of trials."""

    num_trials: int = 5
    """Including those of an interrupted earlier start."""
    num_warm_up: int = 3
    """Untimed optimizer steps of each trial."""
    num_timed: int = 10
    """Timed optimizer steps of each trial."""
    budget_s: float | None = None
    """No trial starts later than this after the first; None for unlimited."""
    is_anew: bool = False
    """True to repeat measurements of earlier starts."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_trials", "num_warm_up", "num_timed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of a trial."""

    end: TrialEnd
    step_time_s: float | None = None
    """Median of the timed steps on the slowest rank; None if not measured."""
    gpu_bytes: int | None = None
    """Maximum memory reserved by PyTorch's allocator on any GPU; None without one."""
    host_bytes: int = 0
    """Peak resident memory of any rank."""
    cause: str | None = None
    """Why it was not measured, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A strategy with its trial."""

    launch: PlannedLaunch
    result: TrialResult
    is_kept: bool
    """True if the measurement of an earlier start is reused."""

    @property
    def plan(self) -> Plan:
        """The plan that was tried."""
        return self.launch.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """The trials of a script so far."""

    tried: tuple[Tried, ...]
    """In the order of the trials."""
    folder: Path
    """Contains a run folder for each trial, and its result."""
    is_out_of_time: bool = False
    """True if the time budget ended it."""
    stopped_by: signal.Signals | None = None
    """The signal that ended it, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning(Trials):
    """All trials of a script, and the winner."""

    candidates: tuple[Plan, ...]
    """Plans to try: the planner's choice, then the fastest that fit according to estimates."""

    @property
    def best(self) -> Tried | None:
        """The fastest measured one; None if there is none."""
        measured = [tried for tried in self.tried if tried.result.step_time_s is not None]
        return min(measured, key=lambda tried: tried.result.step_time_s or 0.0, default=None)

    @property
    def launch(self) -> PlannedLaunch | None:
        """The launch of the fastest, with the measurement as reason in its plan, or None."""
        best = self.best
        if best is None:
            return None
        strategy = best.plan.strategy
        name = "zero_stage" if strategy.engine is Engine.DEEPSPEED else "engine"
        num_measured = sum(tried.result.end is TrialEnd.MEASURED for tried in self.tried)
        reason = Reason(
            field=name,
            value=show(getattr(strategy, name)),
            origin=Origin.PLANNER,
            why=f"the fastest of {num_measured} measured here, {seconds(best.result.step_time_s or 0.0)} "
            "per step",
        )
        others = tuple(other for other in best.plan.reasons if other.field != name)
        return replace(best.launch, plan=replace(best.plan, reasons=(reason, *others)))


def predicted_step_s(plan: Plan) -> float | None:
    """Return the predicted time of a step; None if the machine's rates are unknown."""
    time_of_step = None if plan.estimate is None else plan.estimate.step_time
    return None if time_of_step is None else time_of_step.seconds


def predicted_bytes(plan: Plan) -> int | None:
    """Return the predicted memory reserved by PyTorch's allocator on a GPU; None without an estimate."""
    return None if plan.estimate is None else plan.estimate.device.peak.held_by(Holder.TENSORS, Holder.CACHE)


def run_trials(
    spec: RunSpec,
    policy: TrialPolicy,
    *,
    run_dir: Path,
    settings: Mapping[str, object],
    hang_limit_s: float | None,
    check: Callable[[PlannedLaunch, Observer], None],
    dry_run: bool,
    observer: Observer,
) -> Tuning:
    """Plan a launch, and run its most promising strategies for some steps each, one after another.

    A trial is a complete launch of the unmodified script. Weights are not saved, trackers and the hub receive
    nothing, and files that it changes are restored. Its result is written at once: measurements of an earlier
    start of the same script, machine and versions are reused.

    Args:
        spec: the launch.
        policy: number and length of trials.
        run_dir: folder of all run folders.
        settings: fields of Plan for all trials.
        hang_limit_s: as for `zerofit.launch`.
        check: raises if a launch is forbidden, and reports warnings.
        dry_run: True to only plan the candidates.
        observer: receives each trial.

    Raises:
        UserError: no plan can be made, nothing fits, or the first trial can't run here.
        ExceptionGroup: of UserErrors, if compatibility rules forbid the first.
    """
    _check_can_tune(spec)
    number = _CANDIDATES_PER_TRIAL * policy.num_trials
    launches = tuple(
        replace(planned, plan=replace(planned.plan, **settings))  # type: ignore[arg-type]
        for planned in prepare_launches(replace(spec, num_fastest=number), observer)
    )
    check(launches[0], observer)
    script = Path(script_name(launches[0].target)).name.removesuffix(".py")
    folder = trials_folder(run_dir, f"{TUNE_PREFIX}{script}", launches[0], policy)
    tuning = Tuning(tried=(), folder=folder, candidates=tuple(planned.plan for planned in launches))
    if dry_run:
        return tuning
    of_key = {trial_key(planned.plan): planned for planned in launches}
    kept = (
        Tried(launch=of_key[key], result=result, is_kept=True)
        for key, result in earlier_results(folder, policy).items()
        if key in of_key and result.end is not TrialEnd.FAILED
    )
    return try_each(
        lambda trials: _next_of(launches, trials, policy.num_trials),
        replace(tuning, tried=tuple(kept)),
        policy,
        hang_limit_s=hang_limit_s,
        check=check,
        observer=observer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTrial:
    """A launch to try next, as it is announced."""

    launch: PlannedLaunch
    name: str
    """Such as "trial 2 of 5"."""
    words: str
    """What it tries."""


T = TypeVar("T", bound=Trials)


def try_each(
    choose: Callable[[T], NextTrial | None],
    trials: T,
    policy: TrialPolicy,
    *,
    hang_limit_s: float | None,
    check: Callable[[PlannedLaunch, Observer], None],
    observer: Observer,
) -> T:
    """Run launches for some steps each, one after another, and return all trials.

    Args:
        choose: returns what to try next after the trials so far; None if none is left.
        trials: those of an earlier start.
        policy: length of trials, and their time budget.
        hang_limit_s: as for `zerofit.launch`.
        check: raises if a launch is forbidden.
        observer: receives each trial.
    """
    make_folder(trials.folder)
    for place, sentences in clear_leftovers(cache_folder(os.environ, Path.home())).items():
        for sentence in sentences:  # on files of a trial whose zerofit was killed
            observer.say(sentence)
        keep(place)
    if number := len(trials.tried):
        kept = "1 trial of an earlier start is" if number == 1 else f"{number} trials of an earlier start are"
        observer.say(f"{kept} reused; --anew measures again")
    until = None if policy.budget_s is None else time.monotonic() + policy.budget_s
    free = free_gpu_bytes()
    try:
        with stopping_by_exception():
            while (following := choose(trials)) is not None:
                if until is not None and time.monotonic() >= until:
                    return replace(trials, is_out_of_time=True)
                launch, head = following.launch, following.name
                observer.say(f"{head}: {following.words}")
                ended = _Trial(launch, policy, trials.folder, hang_limit_s, observer).run(check)
                if isinstance(ended, signal.Signals):
                    return replace(trials, stopped_by=ended)
                tried = Tried(launch=launch, result=ended, is_kept=False)
                trials = replace(trials, tried=(*trials.tried, tried))
                observer.say(f"{head}: {result_words(ended)}")
                wait_for_free_gpus(free, observer)
    except KeyboardInterrupt:
        return replace(trials, stopped_by=signal.SIGINT)
    return trials


def _next_of(launches: Sequence[PlannedLaunch], tuning: Tuning, num_trials: int) -> NextTrial | None:
    """Return the launch to try next; None if none is left, or enough were tried."""
    if len(tuning.tried) >= num_trials:
        return None
    results = {trial.plan.strategy: trial.result for trial in tuning.tried}
    tried = {
        place: results[plan.strategy]
        for place, plan in enumerate(tuning.candidates)
        if plan.strategy in results
    }
    place = next_to_try(tuning.candidates, tried)
    if place is None:
        return None
    name = f"trial {len(tuning.tried) + 1} of {num_trials}"
    return NextTrial(launch=launches[place], name=name, words=_candidate_words(launches[place].plan))


def _check_can_tune(spec: RunSpec) -> None:
    """Check that the launch makes a plan, whose strategies can be tried."""
    if spec.makes_a_plan:
        return
    because = spec.why_unplanned
    rehearses = "name the GPUs that the CPU ranks stand for: --cpu --gpus SPEC"
    raise UserError(
        "nothing-to-tune",
        "there are no strategies to try",
        found=because,
        why="trials compare the strategies of a plan, but no plan is made",
        fix=rehearses if because == "--cpu" else f"leave out {because}",
    )


def trials_folder(run_dir: Path, name: str, launch: PlannedLaunch, policy: TrialPolicy) -> Path:
    """Return the folder of the trials of one script on one machine, the same at each start.

    Args:
        name: the folder's name, to which a digest is appended.
    """
    plan = launch.plan
    identity = (
        masked(launch.target),
        os.getcwd(),
        subject_of(plan.capture, plan.workload),
        plan.topology,
        [gpu.name for gpu in plan.machine.gpus],
        plan.versions,
        (policy.num_warm_up, policy.num_timed),
    )
    return run_dir.resolve() / f"{name}-{sha256(repr(identity).encode()).hexdigest()[:8]}"


def trial_key(plan: Plan) -> TrialKey:
    """Return what tells the trials in one folder apart."""
    return plan.strategy, plan.workload.sequence_length


_LARGEST_RESULT = 1024 * 1024
"""Bytes of a trial's result. ASSUMPTION."""


def earlier_results(folder: Path, policy: TrialPolicy) -> dict[TrialKey, TrialResult]:
    """Return the results of earlier starts; none with `--anew`, which removes them."""
    if policy.is_anew:
        shutil.rmtree(folder, ignore_errors=True)
    found = {}
    for file in sorted(folder.glob(f"trial-*/{_RESULT}"), key=lambda path: _number(path.parent)):
        try:
            result = parse_known(TrialResult, read_bounded_text(file, most_bytes=_LARGEST_RESULT))
            plan = plan_from_file(RunFolder(path=file.parent).plan)
        except (OSError, ValueError, UserError):
            continue
        found[trial_key(plan)] = result
    return found


def _number(trial: Path) -> int:
    number = trial.name.rpartition("-")[2]
    return int(number) if re.fullmatch("[0-9]{1,9}", number) else 0


def next_to_try(plans: Sequence[Plan], results: Mapping[int, TrialResult]) -> int | None:
    """Return the index of the most promising plan; None if all were tried or can't fit.

    Strategies that differ only in micro-batch and buckets are a family. A measurement scales the predictions
    of its family; an untried family is assumed to beat its prediction by the best ratio so far. Within a
    family, plans predicted to be about as fast as a tried one come last, and plans predicted to need as much
    memory as one that did not fit are skipped.

    Args:
        plans: the planner's choice first, then by predicted time.
        results: of the trials so far, by index of their plan.
    """
    if 0 not in results:
        return 0
    times = [predicted_step_s(plan) for plan in plans]
    ratios: dict[Strategy, list[float]] = {}
    for place, result in results.items():
        predicted = times[place]
        if result.step_time_s is not None and predicted:
            ratios.setdefault(_family(plans[place]), []).append(result.step_time_s / predicted)
    most_hopeful = min((min(of_family) for of_family in ratios.values()), default=1.0)

    def rank(place: int) -> tuple[bool, float, int]:
        predicted, family = times[place] or 0.0, _family(plans[place])
        alike = [tried for tried in results if _family(plans[tried]) == family]
        is_same = any(abs(predicted - (times[tried] or 0.0)) <= TIME_TIE_SHARE * predicted for tried in alike)
        of_family = ratios.get(family, [most_hopeful])
        return is_same, predicted * sum(of_family) / len(of_family), place

    full = [place for place, outcome in results.items() if outcome.end is TrialEnd.OUT_OF_MEMORY]
    left = [
        place
        for place, plan in enumerate(plans)
        if place not in results and not any(_needs_as_much(plan, plans[larger]) for larger in full)
    ]
    return min(left, key=rank, default=None)


def _family(plan: Plan) -> Strategy:
    return replace(plan.strategy, micro_batch_size=None, gradient_accumulation_steps=None, buckets=Buckets())


def _needs_as_much(plan: Plan, full: Plan) -> bool:
    if plan.estimate is None or full.estimate is None or _family(plan) != _family(full):
        return False
    return plan.estimate.device.peak_bytes >= full.estimate.device.peak_bytes


class _Trial:
    """One trial in its own run folder."""

    def __init__(
        self,
        launch: PlannedLaunch,
        policy: TrialPolicy,
        folder: Path,
        hang_limit_s: float | None,
        observer: Observer,
    ) -> None:
        self._launch, self._policy, self._hang_limit_s = launch, policy, hang_limit_s
        self._observer = observer
        self._runs = folder.parent
        number = max((_number(path) for path in folder.glob("trial-*")), default=0) + 1
        self._folder = RunFolder(path=folder / f"trial-{number}")

    def run(self, check: Callable[[PlannedLaunch, Observer], None]) -> TrialResult | signal.Signals:
        """Run it to its end and write its result; if a signal stopped it, return the signal."""
        make_folder(self._folder.path)
        if cause := refusal(self._launch, check):
            return self._written(TrialResult(end=TrialEnd.FAILED, cause=cause))
        guard = CaptureFolder(cache_folder(os.environ, Path.home()))
        try:
            end = self._start(guard)
            refused = _refused(guard.path)
        finally:
            for sentence in guard.clear(ended_ns=time.time_ns()):
                self._observer.say(sentence)
        if end.kind is EndKind.SIGNAL and end.rank is None:
            return signal.Signals(end.exit_code - 128)
        return self._written(self._result(end, refused))

    def _start(self, guard: CaptureFolder) -> RunEnd:
        named = places(self._launch.target, environment=os.environ, cwd=Path.cwd(), home=Path.home())
        named["caches"] += [str(guard.temporary), str(self._runs)]
        (guard.path / SPEC).write_text(json.dumps(named), encoding="utf-8")
        (guard.path / "trackers").mkdir()
        steps = TrialSteps(
            num_warm_up=self._policy.num_warm_up, num_timed=self._policy.num_timed, guard=str(guard.path)
        )
        # Out of memory is the result: nothing in the script may retry with smaller batches.
        launch = replace(self._launch, plan=replace(self._launch.plan, trial=steps, recovers=True))
        fill_run_folder(self._folder, launch_files(launch, self._folder))
        return start(
            launch,
            self._folder,
            hang_limit_s=self._hang_limit_s,
            observer=self._observer,
            output=self._folder.path / "output.log",
            variables=quiet_variables(guard.path, temporary=guard.temporary),
        )

    def _result(self, end: RunEnd, refused: str | None) -> TrialResult:
        ranks = range(self._launch.plan.topology.world_size)
        records = [record for rank in ranks if (record := read_record(self._folder.ranks, rank)) is not None]
        step_time_s = trial_step_time_s(records) if end.kind is None else None
        kind, cause = TrialEnd.MEASURED, refused or end.cause
        if end.kind in _OUT_OF_MEMORY:
            kind = TrialEnd.OUT_OF_MEMORY
        elif step_time_s is None:
            kind = TrialEnd.FAILED
            cause = cause or (f"the script ended within {self._policy.num_warm_up} steps, before a timed one")
        held = [
            record.peak_gpu_reserved_bytes for record in records if record.peak_gpu_reserved_bytes is not None
        ]
        return TrialResult(
            end=kind,
            step_time_s=step_time_s,
            gpu_bytes=max(held, default=None),
            host_bytes=max((record.peak_host_bytes for record in records), default=0),
            cause=cause,
        )

    def _written(self, result: TrialResult) -> TrialResult:
        write_whole(self._folder.path / _RESULT, json.dumps(asdict(result)) + "\n", mode=0o600)
        return result


def refusal(launch: PlannedLaunch, check: Callable[[PlannedLaunch, Observer], None]) -> str | None:
    """Return why a launch is forbidden; None if it is allowed."""
    errors: Sequence[Exception] = ()
    try:
        check(launch, SILENT)
    except UserError as error:
        errors = (error,)
    except ExceptionGroup as group:
        errors = group.exceptions
    said = [f"{refused.summary} [{refused.rule}]" for refused in errors if isinstance(refused, UserError)]
    return "; ".join(said) or None


def _refused(guard: Path) -> str | None:
    """Return what the script was prevented from doing; None if nothing."""
    try:
        message = parse_json(read_bounded_text(guard / REFUSED, most_bytes=_LARGEST_RESULT))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return f"{message}: the script is ended before that"


def _candidate_words(plan: Plan) -> str:
    predicted = predicted_step_s(plan)
    words = strategy_words(plan)
    if predicted is None or plan.topology.on_cpu:  # where the prediction is for the GPUs planned for
        return words
    return f"{words}, predicted {seconds(predicted)} a step"


def result_words(result: TrialResult) -> str:
    """Return a trial's result in a few words: "402 ms a step, 19.8 GiB", or why there is none."""
    if result.step_time_s is None:
        return result.cause or result.end.value
    held = result.host_bytes if result.gpu_bytes is None else result.gpu_bytes
    return f"{seconds(result.step_time_s)} a step, {format_bytes(held)}"
