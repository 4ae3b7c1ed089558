"""Offloaded activations in a search: where nothing else fits with the same training, and with a reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
from planning_problems import RATES, made_trace, model, problem, solved, spec_of

from zerofit.core.errors import UserError
from zerofit.core.estimates import RunPhase
from zerofit.core.strategy import Lora, Strategy
from zerofit.models.changes.checkpointing import STAYS_ON_GPU
from zerofit.planning.closed_form_estimator import ClosedFormEstimator
from zerofit.planning.plan_reasons import tier_in
from zerofit.planning.problem import Problem
from zerofit.planning.search import OFFLOAD_TIER
from zerofit.planning.solve import solve

_DEEP = model(
    num_parameters=3_000_000_000, num_trainable_parameters=3_000_000_000, num_layers=48, hidden_size=2048
)
_LONG: dict[str, Any] = {
    "num_gpus": 1,
    "memory_gib": 24,
    "global_batch_size": 1,
    "sequence_length": 65536,
    "spec": spec_of(lora=Lora(rank=8), liger=True),
}
"""Activations of checkpointed blocks that a small GPU can't keep."""


def test_activations_go_to_the_host_where_nothing_fits_with_the_same_training() -> None:
    found = solved(problem(facts=_DEEP, **_LONG))
    assert found.chosen is not None
    strategy, reasons = found.chosen.strategy, {reason.field: reason for reason in found.plan.reasons}
    assert (strategy.gradient_checkpointing, strategy.activation_offload) == (True, True)
    assert tier_in(found.problem, strategy) == OFFLOAD_TIER
    assert re.fullmatch(
        r"with them on the GPU: needs (at least )?[\d.]+ GiB of [\d.]+ GiB on each GPU",
        reasons["activation_offload"].why,
    )
    host = found.chosen.estimate.host.of(RunPhase.FORWARD)
    assert host is not None
    assert any(term.name == "offloaded activations" for term in host.terms)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"memory_gib": 80}, "they fit on the GPU"),
        ({"host_gib": 4}, "the host is too small"),
        ({"spec": spec_of(lora=Lora(rank=8), liger=True, gradient_checkpointing=False)}, "not with that"),
    ],
)
def test_activations_stay_on_the_gpu(fields: dict[str, Any], why: str) -> None:
    found = solved(problem(facts=_DEEP, **{**_LONG, **fields}))
    assert not found.head.strategy.activation_offload, why


def test_a_model_that_keeps_activations_on_the_gpu_has_no_plan_that_moves_them() -> None:
    asked = problem(facts=_DEEP, **_LONG)

    class Refusing(ClosedFormEstimator):
        def fits(self, strategy: Strategy) -> bool:
            if strategy.activation_offload:
                raise UserError(STAYS_ON_GPU, "they can't go", found="it", why="its code", fix="none")
            return super().fits(strategy)

    def refusing(changed: Problem) -> ClosedFormEstimator:
        return Refusing(changed, trace=made_trace(changed.model), rates=RATES)

    found = solve(asked, estimator_of=refusing)
    assert not found.fits
    assert not found.head.strategy.activation_offload
