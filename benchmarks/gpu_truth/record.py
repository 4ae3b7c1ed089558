"""A regret question while it is measured: the outcome of each strategy, and what is left to run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from measuring.results import TrialOutcome, TrialState

from gpu_truth.grid import name_of
from gpu_truth.results import RegretResult, Rule, Tried
from gpu_truth.store import LASTING, now
from gpu_truth.usual import TRAINER, tried_trainer, usual_strategies
from gpu_truth.verdict import NUM_REPEATS, compared, lacks_repeats
from zerofit.planning.search import OFFLOAD_TIER, tier

if TYPE_CHECKING:
    from gpu_truth.grid import Entry, Grid, Question
    from zerofit.core.strategy import Strategy

CUT_OFF = TrialOutcome(state=TrialState.NOT_RUN, reason="the budget was spent")


class Record:
    """What is known of a question.

    Args:
        question: what is asked.
        grid: what is to be measured for it.
        before: what an earlier run of the harness measured of it, which stands; None without one. It
            counts for nothing where it is of another question, though of the same key.
    """

    def __init__(self, question: Question, grid: Grid, before: RegretResult | None = None) -> None:
        self._question = question
        self._grid = grid
        self._usual = usual_strategies(question)
        self._outcomes: dict[Strategy, TrialOutcome] = {}
        self._repeats: dict[Strategy, tuple[float, ...]] = {}
        self._trainer = CUT_OFF
        self._runs = 1
        if before is not None and question.is_of(before):
            self._runs = before.runs + 1
            self._take(before)

    def _take(self, before: RegretResult) -> None:
        for one in (*before.usual, *before.grid, *((before.choice,) if before.choice else ())):
            if one.outcome.state is TrialState.NOT_RUN:
                continue
            if one.strategy is not None:
                self._outcomes[one.strategy] = one.outcome
                self._repeats[one.strategy] = one.repeats_samples_per_s
            elif one.name == TRAINER:
                self._trainer = one.outcome

    def left(self) -> tuple[Strategy, ...]:
        """Return what is to be run, in this order, without what has come to an end that stands.

        The choice comes first, then what a user would take, then the grid, the fastest by prediction first,
        and checks on the rules last: a short budget leaves out those that are least likely to be the best.
        """
        choice = (self._grid.choice,) if self._grid.choice else ()
        runs = [one for one in self._grid.entries if one.rule is None]
        ordered = sorted(runs, key=lambda one: bool(one.why))
        wanted = dict.fromkeys((*choice, *self._usual.values(), *(one.strategy for one in ordered)))
        return tuple(one for one in wanted if self._of(one).state not in LASTING)

    def repeats_left(self) -> tuple[Strategy, ...]:
        """Return the choice and its rival, alternating, as often as they are still to be repeated."""
        result = self.result()
        if not lacks_repeats(result):
            return ()
        pair = [one.strategy for one in compared(result) if one.strategy is not None]
        return tuple(
            one for number in range(NUM_REPEATS) for one in pair if len(self._repeats.get(one, ())) <= number
        )

    @property
    def lacks_trainer(self) -> bool:
        """True if Trainer is still to be run."""
        return self._trainer.state not in LASTING

    def put(self, strategy: Strategy, outcome: TrialOutcome) -> None:
        """Take in how a strategy ended."""
        self._outcomes[strategy] = outcome

    def put_trainer(self, outcome: TrialOutcome) -> None:
        """Take in how Trainer ended."""
        self._trainer = outcome

    def put_repeat(self, strategy: Strategy, outcome: TrialOutcome) -> None:
        """Take in a further run; one that failed leaves the repeat to a later run of the harness."""
        if (again := self._speed(outcome)) is not None:
            self._repeats[strategy] = (*self._repeats.get(strategy, ()), again)

    def result(self) -> RegretResult:
        """Return what is known by now; what was not run says so."""
        question, choice = self._question, self._grid.choice
        changes_states = choice is not None and tier(choice) > OFFLOAD_TIER
        note = "8-bit optimizer states, which the grid has not" if changes_states else ""
        return RegretResult(
            key=question.key,
            model=question.model,
            task=question.task,
            sequence_length=question.sequence_length,
            global_batch_size=question.global_batch_size,
            limit_bytes=question.limit_bytes,
            choice=self._tried(choice, predicted_bytes=self._grid.choice_bytes, note=note)
            if choice
            else None,
            grid=tuple(self._tried_of(one) for one in self._grid.entries),
            usual=(
                *(self._tried(strategy, name=name) for name, strategy in self._usual.items()),
                tried_trainer(self._trainer, question),
            ),
            date=now(),
            runs=self._runs,
        )

    def _tried_of(self, entry: Entry) -> Tried:
        """Return how a strategy of the grid ended; one that is left out may have run as what is usual."""
        is_check = entry.rule is None and bool(entry.why)
        return self._tried(
            entry.strategy,
            predicted_bytes=entry.predicted_bytes,
            left_out=entry.rule,
            why=entry.why if entry.rule else "",
            note=f"a check on a rule: {entry.why}" if is_check else "",
        )

    def _tried(
        self,
        strategy: Strategy,
        *,
        name: str = "",
        predicted_bytes: int | None = None,
        left_out: Rule | None = None,
        why: str = "",
        note: str = "",
    ) -> Tried:
        outcome = self._outcomes.get(strategy)
        if outcome is None:
            outcome = TrialOutcome(state=TrialState.NOT_RUN, reason=why) if why else CUT_OFF
        return Tried(
            name=name or name_of(strategy),
            strategy=strategy,
            outcome=outcome,
            samples_per_s=self._speed(outcome),
            repeats_samples_per_s=self._repeats.get(strategy, ()),
            predicted_bytes=predicted_bytes,
            left_out=left_out,
            note=note,
        )

    def _of(self, strategy: Strategy) -> TrialOutcome:
        return self._outcomes.get(strategy, CUT_OFF)

    def _speed(self, outcome: TrialOutcome) -> float | None:
        measured = outcome.measured
        return self._question.global_batch_size / measured.step_time_s if measured else None
