"""A plan's word on evaluations: whether they fit where training does, and the argument with which they do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from captured_scripts import batch, captured_problem, trainer
from made_logs import LogBuilder
from planning_problems import RATES, closed_forms, made_trace

from zerofit.core.allocation_log import TensorKind, Trace
from zerofit.core.capture import CapturedEvaluation, CapturedLengths
from zerofit.core.errors import UserError
from zerofit.core.plan import plan_from_json, plan_to_json
from zerofit.core.units import GIB, MIB
from zerofit.planning.answer_lines import hint_lines
from zerofit.planning.evaluation import evaluation_lines, with_evaluation
from zerofit.planning.solve import solve
from zerofit.planning.training_estimator import TrainingEstimator

if TYPE_CHECKING:
    from zerofit.core.allocation_log import TraceRequest
    from zerofit.core.estimates import EvaluationEstimate
    from zerofit.planning.solve import Answer

KEEPS = CapturedEvaluation(
    batch_size=8,
    num_samples=4096,
    batches=(batch(8, 512),),
    lengths=CapturedLengths(num_samples=80, is_whole=True, p50=100, p90=300, p99=500, longest=512),
    keeps_predictions=True,
)
LOSS_ALONE = replace(KEEPS, keeps_predictions=False)


def _answer(
    captured: CapturedEvaluation, *, kept: int = 0, activations: int = 0, fails: bool = False, gpus: int = 2
) -> Answer:
    """Return the answer for a batch whose samples keep so many bytes, and need so many for a moment."""
    asked = captured_problem(trainer(evaluation=captured), num_gpus=gpus, host_gib=4096)
    asked_for: list[TraceRequest] = []

    def trace(request: TraceRequest) -> Trace:
        if not request.evaluates:
            made: Trace = made_trace(asked.model)(request)
            return made
        asked_for.append(request)
        if fails:
            raise UserError("trace-failed", "the model can't run", found="item()", why="", fix="")
        builder = LogBuilder()
        builder.free(builder.allocate(TensorKind.ACTIVATION, 0, per_sample=activations))
        builder.allocate(TensorKind.KEPT, 0, per_sample=kept)
        return Trace(request=request, logs=(builder.build(),))

    answer = solve(asked, estimator_of=closed_forms)
    answer = with_evaluation(answer, TrainingEstimator(asked, trace=trace, rates=RATES))
    assert all(request.sequence_length == 512 for request in asked_for)
    return answer


def _found(answer: Answer) -> EvaluationEstimate:
    assert answer.plan.estimate is not None
    assert answer.plan.estimate.evaluation is not None
    return answer.plan.estimate.evaluation


def test_kept_predictions_that_do_not_fit_are_told_with_the_argument_that_helps() -> None:
    answer = _answer(KEEPS, kept=64 * MIB)  # 4096 samples: 256 GiB on each rank
    found = _found(answer)
    assert not found.fits
    assert found.device.peak_bytes > 256 * GIB
    assert found.host_bytes == 2 * 4096 * 64 * MIB
    ((name, value),) = found.change
    assert (name, int(value)) == ("eval_accumulation_steps", 32)  # 512 samples: 32 GiB, twice during the copy
    (line,) = evaluation_lines(answer)
    assert line == hint_lines(answer)[0]
    assert line.startswith("warning: evaluation in batches of 8 with kept predictions runs out of memory: ")
    assert line.endswith("; set --eval_accumulation_steps 32")


def test_samples_that_fill_no_batch_are_not_counted_as_kept() -> None:
    """What 2 ranks keep of 4094 samples in batches of 16, while the last batch is copied."""
    whole, lacking = (
        _found(_answer(replace(KEEPS, num_samples=number), kept=MIB)).device.most_tensors
        for number in (4096, 4094)
    )
    assert whole - lacking == 2 * MIB


def test_a_batch_that_does_not_fit_is_made_smaller() -> None:
    answer = _answer(LOSS_ALONE, activations=20 * GIB)
    assert _found(answer).change == (("per_device_eval_batch_size", "2"),)
    (line,) = evaluation_lines(answer)
    assert "evaluation in batches of 8 runs out of memory" in line


def test_nothing_is_said_of_evaluations_that_fit() -> None:
    answer = _answer(replace(KEEPS, num_samples=64), kept=64 * MIB)
    assert (_found(answer).fits, _found(answer).change, [*evaluation_lines(answer)]) == (True, (), [])


def test_evaluations_that_the_script_may_make_are_told_as_such() -> None:
    (line,) = evaluation_lines(_answer(replace(LOSS_ALONE, is_certain=False), activations=20 * GIB))
    assert "evaluation in batches of 8, if the script does it, runs out of memory" in line


@pytest.mark.parametrize("captured", [KEEPS, LOSS_ALONE])
def test_a_trainer_whose_evaluation_can_t_be_traced_has_a_note(captured: CapturedEvaluation) -> None:
    answer = _answer(captured, fails=True)
    assert answer.plan.estimate is not None
    assert answer.plan.estimate.evaluation is None
    assert answer.notes[-1] == "memory of evaluation is not counted: the model can't run: item()"


def test_an_unknown_number_of_samples_is_told() -> None:
    answer = _answer(replace(KEEPS, num_samples=None), kept=64 * MIB)
    assert "predictions of one batch are counted" in answer.notes[-1]


def test_predictions_of_each_batch_are_gathered_for_its_metrics_and_none_reach_the_host() -> None:
    by_batch = replace(KEEPS, takes_batches=True, moves_every=1, num_samples=None)
    answer = _answer(by_batch, kept=8 * GIB)  # of 8 samples on each of 2 ranks
    found = _found(answer)
    assert found.device.peak_bytes > 2 * 8 * 8 * GIB
    assert (found.host_bytes, found.change) == (0, (("per_device_eval_batch_size", "2"),))
    assert not any("predictions of one batch" in note for note in answer.notes)
    (line,) = evaluation_lines(answer)
    assert "evaluation in batches of 8 with metrics of each batch runs out of memory" in line


def test_a_plan_file_keeps_it() -> None:
    plan: Any = _answer(KEEPS, kept=64 * MIB).plan
    assert plan_from_json(plan_to_json(plan), name="plan.json") == plan
