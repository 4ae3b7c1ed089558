"""Traced steps of optimizers: states and temporaries are those of the real step(), without values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_births import measured
from torch import nn

from zerofit.core.estimates import RunPhase
from zerofit.core.optimizers.lookup import memory_of, optimizer_class
from zerofit.core.optimizers.step_trace import OwnSteps
from zerofit.core.strategy import Strategy
from zerofit.models.element_wise import try_element_wise
from zerofit.models.trace.optimizer_step import trace_steps
from zerofit.planning.estimate.device_memory.optimizers import STATES, Stepped, optimizer_of
from zerofit.planning.estimate.device_memory.replay import Tape, replay_live

Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_SHAPES = ((300, 70), (4096,), (40,), (64, 128), (100, 90))
_RANK = {"rank": 8, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}


def _projected(name: str, **more: Any) -> Made:
    """Return a maker of an optimizer that projects matrices to a low rank."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        package, _, class_name = name.partition(".")
        kind = getattr(_imported(package), class_name)
        matrices = [one for one in parameters if one.dim() == 2]
        others = [one for one in parameters if one.dim() != 2]
        options = {"relative_step": False, "scale_parameter": False} if "Adafactor" in name else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that transformers' AdamW is deprecated
            return kind([{"params": others}, {"params": matrices, **_RANK, **more}], lr=1e-3, **options)

    return make


def _imported(package: str) -> Any:
    return pytest.importorskip(package, reason=f"pip install {package.replace('_', '-')}")


def _schedule_free(name: str) -> Made:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = getattr(_imported("schedulefree"), name)(parameters, lr=1e-3)
        optimizer.train()
        return optimizer

    return make


def _of_torch(name: str, **options: Any) -> Made:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if name == "Muon":
            parameters = [one for one in parameters if one.dim() == 2]
        return getattr(torch.optim, name)(parameters, lr=1e-3, **options)

    return make


_CASES: dict[str, Made] = {
    "AdamW": _of_torch("AdamW", foreach=True),
    "AdamW amsgrad": _of_torch("AdamW", foreach=True, amsgrad=True),
    "AdamW maximize": _of_torch("AdamW", foreach=True, maximize=True),
    "SGD": _of_torch("SGD", foreach=True, momentum=0.9, weight_decay=0.1),
    "SGD nesterov": _of_torch("SGD", foreach=True, momentum=0.9, weight_decay=0.1, nesterov=True),
    "RMSprop": _of_torch("RMSprop", foreach=True, momentum=0.9, centered=True),
    "Adagrad": _of_torch("Adagrad", foreach=True),
    "NAdam": _of_torch("NAdam", foreach=True),
    "RAdam": _of_torch("RAdam", foreach=True),
    "Adamax": _of_torch("Adamax", foreach=True),
    "Adadelta": _of_torch("Adadelta", foreach=True),
    "ASGD": _of_torch("ASGD", foreach=True),
    "Rprop": _of_torch("Rprop", foreach=True),
    "Adafactor": _of_torch("Adafactor"),
    "Muon": _of_torch("Muon"),
    "AdamWScheduleFree": _schedule_free("AdamWScheduleFree"),
    "RAdamScheduleFree": _schedule_free("RAdamScheduleFree"),
    "SGDScheduleFree": _schedule_free("SGDScheduleFree"),
    "GaLoreAdamW": _projected("galore_torch.GaLoreAdamW"),
    "GaLoreAdafactor": _projected("galore_torch.GaLoreAdafactor"),
    "APOLLOAdamW": _projected("apollo_torch.APOLLOAdamW", proj="random", scale_type="channel"),
}
_FORMATS = pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.slow)],
)


def _parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in _SHAPES]


@_FORMATS
@pytest.mark.parametrize("made", _CASES.values(), ids=_CASES)
def test_states_and_largest_moments_are_those_of_the_real_steps(made: Made, dtype: torch.dtype) -> None:
    if made is _CASES["Rprop"]:
        pytest.skip("its real step chooses elements by a mask, of which a trace knows no number")
    steps = trace_steps(made(_parameters(dtype)))
    real = measured(made, _parameters(dtype))
    assert steps.own.state_bytes == real.states
    first, second = _peaks(steps)
    assert (first, second) == real.peaks


def _peaks(steps: OwnSteps) -> tuple[int, int]:
    """Return the most that a plan counts in the first step and in the second."""
    own = steps.own
    tensors = [
        Stepped(num_elements=number, bytes_per_element=width)
        for number, width in zip(own.elements, own.element_bytes, strict=True)
    ]
    tape = Tape()
    for is_first in (True, False):
        tape.begin(RunPhase.STEP if is_first else RunPhase.SAVE)
        optimizer_of(Strategy(), steps).step(tape, tensors, is_first=is_first)
    first, second = (peak.live_bytes for peak in replay_live(tape).peaks)
    return first, second


@pytest.mark.parametrize("made", _CASES.values(), ids=_CASES)
def test_a_script_and_its_optimizer_stay_as_they_were(made: Made) -> None:
    parameters = _parameters()
    before = [one.detach().clone() for one in parameters]
    optimizer = made(parameters)
    kept = {key: dict(value) for key, value in optimizer.state.items()}
    trace_steps(optimizer)
    assert all(torch.equal(one, old) for one, old in zip(parameters, before, strict=True))
    assert all(one.grad is None for one in parameters)
    assert {key: value.keys() for key, value in optimizer.state.items()} == {
        key: value.keys() for key, value in kept.items()
    }


@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdamW amsgrad"])
def test_the_table_and_a_trace_agree(name: str) -> None:
    optimizer = _CASES[name](_parameters())
    own = trace_steps(optimizer).own
    memory, is_exact = memory_of(optimizer_class(optimizer), optimizer.param_groups[0])
    assert is_exact
    assert memory is not None
    assert own.state_bytes == memory.like_parameter * own.num_bytes
    assert own.temporary_bytes == own.num_bytes
    assert own.moved_bytes / own.num_elements == pytest.approx(memory.step_bytes, rel=0.01)


def test_on_flat_shards_states_are_as_wide_as_their_elements() -> None:
    steps = trace_steps(_CASES["NAdam"](_parameters(torch.bfloat16)))
    tape = Tape()
    flat = Stepped(num_elements=1_000_000, shape=(1_000_000,))
    optimizer_of(Strategy(), steps).step(tape, [flat], is_first=True)
    assert sum(size for size, term in zip(tape.sizes, tape.terms, strict=True) if term == STATES) == 8_000_000
    assert optimizer_of(Strategy(), steps).costs.least_bytes == 4  # of the script's own weights


def test_on_flat_shards_what_factors_matrices_keeps_an_element_for_each() -> None:
    steps = trace_steps(_CASES["Adafactor"](_parameters()))
    assert steps.flat is not None
    tape = Tape()
    flat = Stepped(num_elements=1_000_000, shape=(1_000_000,))
    optimizer_of(Strategy(), steps).step(tape, [flat], is_first=True)
    states = sum(size for size, term in zip(tape.sizes, tape.terms, strict=True) if term == STATES)
    assert states >= 4_000_000 > 8 * steps.own.state_bytes * 4_000_000 / steps.own.num_bytes


def test_a_plan_that_trains_a_part_counts_a_part_of_the_states() -> None:
    steps = trace_steps(_CASES["NAdam"](_parameters()))
    tape = Tape()
    optimizer_of(Strategy(), steps).step(tape, [Stepped(num_elements=21_000, shape=(300, 70))], is_first=True)
    assert tape.sizes[0] == 2 * 4 * 21_000


@pytest.mark.parametrize("name", ["Muon", "GaLoreAdamW", "APOLLOAdamW"])
def test_what_needs_matrices_has_no_step_on_flat_shards(name: str) -> None:
    optimizer = _CASES[name](_parameters())
    assert trace_steps(optimizer).flat is None
    assert try_element_wise(optimizer).is_kept is False


def test_frozen_parameters_get_no_states() -> None:
    parameters = _parameters()
    parameters[0].requires_grad_(False)
    own = trace_steps(_CASES["NAdam"](parameters)).own
    assert own.state_bytes == 8 * sum(one.numel() for one in parameters[1:])


def test_a_step_that_needs_values_raises() -> None:
    class ReadsValues(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].grad.numpy()

    with pytest.raises(Exception, match=r".+"):
        trace_steps(ReadsValues(_parameters(), lr=0.1))
