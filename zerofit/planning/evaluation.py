"""The memory of a script's evaluations under the chosen strategy, and the arguments with which they fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.core.estimates import EvaluationEstimate
from zerofit.core.units import format_bytes
from zerofit.planning.estimate.device_memory.memory import estimate_evaluation
from zerofit.planning.estimate.engines.evaluation import Evaluation
from zerofit.planning.samples import samples_of
from zerofit.planning.search import EngineRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.allocation_log import Trace
    from zerofit.core.capture import CapturedEvaluation
    from zerofit.core.estimates import MemoryEstimate
    from zerofit.planning.estimate.engines.engine import Setup
    from zerofit.planning.problem import Problem
    from zerofit.planning.solve import Answer
    from zerofit.planning.training_estimator import TrainingEstimator

MOVES, BATCH = "eval_accumulation_steps", "per_device_eval_batch_size"
"""Fields of TrainingArguments that change how much memory evaluations need."""


def with_evaluation(answer: Answer, estimator: TrainingEstimator) -> Answer:
    """Return an answer with the memory that the script's evaluations need under the choice.

    They don't decide the choice: another strategy costs time in each step, while TrainingArguments lower the
    memory of evaluations alone.

    Args:
        estimator: by traces, of the answer's problem.
    """
    problem, chosen = answer.problem, answer.found.chosen
    captured = None if problem.script is None else problem.script.capture.evaluation
    estimate = answer.plan.estimate
    if captured is None or chosen is None or estimate is None:
        return answer
    if problem.topology.pipeline_parallel_size > 1:
        return _not_counted(answer, "a pipeline runs it in stages")
    assert problem.script is not None
    samples = samples_of(replace(problem.script.capture, batches=captured.batches, lengths=captured.lengths))
    try:
        setup, trace = estimator.evaluated(chosen.strategy, samples)
    except UserError as error:
        return _not_counted(answer, f"{error.summary}: {error.found}")
    except EngineRefusedError as refused:
        return _not_counted(answer, f"{refused.why.summary}: {refused.why.found}")
    found = _Evaluations(problem=problem, setup=setup, trace=trace, captured=captured).estimate()
    if captured.keeps_predictions and not captured.takes_batches and captured.num_samples is None:
        note = "how many samples are evaluated is not known: the predictions of one batch are counted"
        answer = replace(answer, notes=(*answer.notes, note))
    return replace(answer, plan=replace(answer.plan, estimate=replace(estimate, evaluation=found)))


def _not_counted(answer: Answer, why: str) -> Answer:
    return replace(answer, notes=(*answer.notes, f"memory of evaluation is not counted: {why}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluations:
    """The evaluations of a run, with any arguments."""

    problem: Problem
    setup: Setup
    """Of a rank that trains."""
    trace: Trace
    """Of a batch that is evaluated."""
    captured: CapturedEvaluation

    def estimate(self) -> EvaluationEstimate:
        """Return the memory with the script's arguments, and others if it does not fit."""
        device, fits = self._memory(self.captured)
        change: tuple[tuple[str, str], ...] = ()
        if not fits:
            fitting = next((other for other in self._others() if self._memory(other)[1]), None)
            change = () if fitting is None else tuple(_changed(self.captured, fitting))
        return EvaluationEstimate(
            device=device,
            fits=fits,
            batch_size=self.captured.batch_size,
            host_bytes=self._host_bytes(),
            change=change,
        )

    def _memory(self, captured: CapturedEvaluation) -> tuple[MemoryEstimate, bool]:
        return estimate_evaluation(
            self.setup,
            self._evaluation(captured),
            gpu=self.problem.smallest_gpu,
            limit_bytes=self.problem.device_bytes,
        )

    def _evaluation(self, captured: CapturedEvaluation) -> Evaluation:
        together = _num_batches(captured, self._num_ranks) if captured.keeps_predictions else 1
        num_batches = min(together, captured.moves_every or together)
        is_whole = captured.keeps_predictions and num_batches == together
        return Evaluation(
            log=self.trace.log_for(captured.batch_size),
            batch_size=captured.batch_size,
            num_batches=num_batches,
            num_ranks=self._num_ranks,
            concatenates=captured.concatenates,
            num_lacking=_num_lacking(captured, self._num_ranks) if is_whole else 0,
        )

    @property
    def _num_ranks(self) -> int:
        """Ranks that evaluate samples of their own."""
        return self.problem.topology.data_parallel_size

    def _others(self) -> Iterator[CapturedEvaluation]:
        """Yield other arguments, in the order of the time that they cost."""
        captured = self.captured
        if captured.keeps_predictions:
            together = self._evaluation(captured).num_batches
            for moves_every in _halved(together):
                yield replace(captured, moves_every=moves_every)
        moved = replace(captured, moves_every=1) if captured.keeps_predictions else captured
        for size in _halved(captured.batch_size):
            yield replace(moved, batch_size=size)

    def _host_bytes(self) -> int:
        """Return what all ranks of a node hold in the end: each has the predictions of all samples."""
        captured, num_ranks = self.captured, self._num_ranks
        if not captured.keeps_predictions or captured.takes_batches:
            return 0
        one = self._evaluation(replace(captured, moves_every=1))
        everything = sum(one.kept_sizes) * num_ranks * _num_batches(captured, num_ranks)
        return everything * self.problem.topology.ranks_per_node


def _num_batches(captured: CapturedEvaluation, num_ranks: int) -> int:
    """Return the batches of each rank; 1 if the number of samples is not known."""
    if captured.num_samples is None:
        return 1
    return max(1, -(-captured.num_samples // (captured.batch_size * num_ranks)))


def _num_lacking(captured: CapturedEvaluation, num_ranks: int) -> int:
    """Return the samples by which the last batch of all ranks is not full."""
    if captured.num_samples is None:
        return 0
    return -captured.num_samples % (captured.batch_size * num_ranks)


def _halved(number: int) -> Iterator[int]:
    """Yield the powers of two below a number, the largest first."""
    size = 1 << max(0, (number - 1).bit_length() - 1)
    while size >= 1 and size < number:
        yield size
        size //= 2


def _changed(before: CapturedEvaluation, after: CapturedEvaluation) -> Iterator[tuple[str, str]]:
    if after.moves_every != before.moves_every:
        yield MOVES, str(after.moves_every)
    if after.batch_size != before.batch_size:
        yield BATCH, str(after.batch_size)


def evaluation_lines(answer: Answer) -> Iterator[str]:
    """Yield a sentence if the evaluations of what fits do not, or may not, and how they would."""
    evaluation = answer.plan.estimate.evaluation if answer.plan.estimate is not None else None
    problem = answer.problem
    if evaluation is None or answer.found.chosen is None:
        return
    where = " on each GPU" if problem.topology.world_size > 1 else ""
    device = evaluation.device
    needs = f"{format_bytes(device.peak_bytes)} ±{device.uncertainty:.0%}"
    said = f"{needs} of {format_bytes(problem.card_bytes)}{where}"
    flags = " ".join(f"--{name} {value}" for name, value in evaluation.change)
    what = _what(answer)
    if not evaluation.fits:
        how = f"set {flags}" if flags else "no batch of it was found to fit"
        yield f"warning: {what} runs out of memory: {said}; {how}"
    elif problem.is_close_on_gpu(device):
        yield f"{what} fits closely: {said}"
    if evaluation.host_bytes > problem.host_bytes:
        needed, limit = format_bytes(evaluation.host_bytes), format_bytes(problem.host_bytes)
        yield (
            f"warning: predictions for compute_metrics take {needed} of {limit} of host memory on each node, "
            "as each rank holds those of all: reduce them in preprocess_logits_for_metrics"
        )


def _what(answer: Answer) -> str:
    assert answer.problem.script is not None
    captured = answer.problem.script.capture.evaluation
    assert captured is not None
    kept = " with kept predictions" if captured.keeps_predictions else ""
    if captured.takes_batches:
        kept = " with metrics of each batch"
    when = "" if captured.is_certain else ", if the script does it,"
    return f"evaluation in batches of {captured.batch_size}{kept}{when}"
