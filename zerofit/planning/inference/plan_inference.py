"""plan_inference: a model, a machine and prompts to the layout that generates, its batch and the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.strategy import Precision
from zerofit.planning.inference.planned import InferencePlan
from zerofit.planning.inference.reasons import reasons_of, why_it_loses
from zerofit.planning.inference.refusals import check_request
from zerofit.planning.inference.request import DTYPES
from zerofit.planning.inference.search import (
    Question,
    best_candidates,
    excess,
    fastest,
    fits_at_all,
    is_close,
)
from zerofit.planning.inference.suggestions import suggestions

if TYPE_CHECKING:
    from zerofit.core.facts import Machine, ModelFacts, Versions
    from zerofit.planning.inference.request import InferenceRequest, InferenceWorkload


def plan_inference(
    *,
    model: ModelFacts,
    machine: Machine,
    versions: Versions,
    workload: InferenceWorkload,
    request: InferenceRequest,
) -> InferencePlan:
    """Return the plan of a generation; where nothing fits, that of the nearest layout (`fits` is False).

    Of the layouts that fit, each with its largest batch, the one is taken that needs the least time to move
    and read weights (zerofit.planning.inference.search): computed, not measured. Where a rate is not known, it is the
    first of them: the whole model on each rank, ZeRO-3 over all ranks, the weights in host memory, on NVMe.

    Raises:
        UserError: the flags contradict each other, the machine, or what inference is.
    """
    check_request(machine, request)
    precision = request.precision or DTYPES.get(model.checkpoint_dtype, Precision.FP32)
    question = Question(
        model=model,
        machine=machine,
        versions=versions,
        workload=workload,
        request=request,
        precision=precision,
    )
    candidates = best_candidates(question)
    nearest = min(candidates, key=lambda one: excess(one, question))
    chosen = fastest(candidates) or nearest
    return InferencePlan(
        model=model,
        machine=machine,
        versions=versions,
        workload=workload,
        request=request,
        chosen=chosen,
        is_close=chosen.fits and is_close(chosen, question),
        others=tuple((one, why_it_loses(one, chosen)) for one in candidates if one is not chosen),
        device_bytes=question.device_bytes,
        host_bytes=question.host_bytes,
        reasons=reasons_of(chosen, candidates, question),
        suggestions=() if chosen.fits else suggestions(question, fits=fits_at_all),
    )
