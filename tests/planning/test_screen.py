"""The screen of plan --fast holds for every peak within its uncertainty, and for the allocator's replay."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from captured_scripts import captured_problem
from planning_problems import LARGE, closed_forms, model, problem, replays, solved, spec_of

from zerofit.core.strategy import Engine, OffloadDevice, OptimizerName, ZeroStage
from zerofit.planning.estimate.closed_form.uncertainty import UNCERTAINTY
from zerofit.planning.options import Allow
from zerofit.planning.problem import Problem
from zerofit.planning.screen import Fit, Screen
from zerofit.planning.screen_table import first_screen, table_below, verdict_lines
from zerofit.planning.search import RuledOut, placement_of
from zerofit.planning.solve import solve

_SETTLED: dict[str, Any] = {
    "engine": Engine.NATIVE,
    "optimizer": OptimizerName.ADAMW,
    "gradient_checkpointing": False,
    "micro_batch_size": 8,
}
_PROBLEMS = {
    "much room": problem(num_gpus=1),
    "small cards": problem(num_gpus=2, memory_gib=6),
    "one small card": problem(num_gpus=1, memory_gib=3.5),
    "large model": problem(facts=LARGE, num_gpus=4, memory_gib=40, global_batch_size=8),
    "large model on cards where all is close": problem(
        facts=LARGE, num_gpus=2, memory_gib=28, global_batch_size=8
    ),
    "little host memory": problem(facts=LARGE, num_gpus=1, memory_gib=24, host_gib=24, global_batch_size=2),
    "nothing to choose": problem(num_gpus=1, spec=spec_of(**_SETTLED)),
    "nothing fits": problem(facts=LARGE, num_gpus=1, memory_gib=4, host_gib=8, global_batch_size=1),
    "adapters allowed": problem(
        facts=LARGE,
        num_gpus=1,
        memory_gib=16,
        host_gib=16,
        global_batch_size=4,
        allow=frozenset({Allow.LORA}),
    ),
}


def _screen(asked: Problem) -> Screen:
    screen = solved(asked, screens=True).screen
    assert screen is not None
    return screen


@cache
def _screen_named(name: str) -> Screen:
    return _screen(_PROBLEMS[name])


def _with_peaks(asked: Problem, factor: float) -> Problem:
    """Return the problem as it is if each peak is as many times the estimate."""
    gpus = tuple(replace(gpu, memory_bytes=int(gpu.memory_bytes / factor)) for gpu in asked.machine.gpus)
    return replace(asked, machine=replace(asked.machine, gpus=gpus))


_LEAST, _MOST = 1 - UNCERTAINTY + 0.01, 1 + UNCERTAINTY - 0.01


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        pytest.param(name, factor, marks=() if factor == (_LEAST, _MOST)[number % 2] else pytest.mark.slow)
        for number, name in enumerate(_PROBLEMS)
        for factor in (_LEAST, 0.9, 1.0, 1.1, _MOST)
    ],
)
def test_a_screen_is_right_for_every_peak_within_the_uncertainty(name: str, factor: float) -> None:
    asked = _PROBLEMS[name]
    screen = _screen_named(name)
    truth = solved(_with_peaks(asked, factor)).found
    fitting = {
        placement_of(one.strategy) for one in (truth.chosen, *truth.others) if one is not None and one.fits
    }
    for row in screen.rows:
        placement = placement_of(row.judged.strategy)
        assert row.fit is not Fit.FITS or placement in fitting, placement
        assert row.fit is not Fit.TOO_LARGE or placement not in fitting, placement
    if screen.chosen is not None:
        assert truth.chosen is not None
        assert truth.chosen.strategy == screen.chosen.strategy


_REPLAYED = ("small cards", "large model", "little host memory", "adapters allowed")
"""Problems that the allocator is replayed for at each change; the others are slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _REPLAYED else pytest.mark.slow) for name in _PROBLEMS]
)
def test_the_allocators_replay_does_not_contradict_a_screen(name: str) -> None:
    asked = _PROBLEMS[name]
    screen = _screen_named(name)
    truth = solve(asked, estimator_of=replays, quick_estimator_of=closed_forms).found
    fitting = {
        placement_of(one.strategy) for one in (truth.chosen, *truth.others) if one is not None and one.fits
    }
    said = {placement_of(row.judged.strategy): row.fit for row in screen.rows}
    assert {placement for placement, fit in said.items() if fit is Fit.FITS} <= fitting
    assert not {placement for placement, fit in said.items() if fit is Fit.TOO_LARGE} & fitting
    if screen.chosen is not None:
        assert truth.chosen is not None
        assert truth.chosen.strategy == screen.chosen.strategy


def test_a_choice_is_named_only_if_it_is_not_open() -> None:
    named = {name for name in _PROBLEMS if _screen_named(name).chosen is not None}
    assert named == {"nothing to choose"}


def test_a_script_that_surely_fits_is_kept() -> None:
    answer = solved(captured_problem(num_gpus=1), screens=True)
    assert answer.screen is not None
    assert answer.as_it_is is not None
    assert answer.screen.chosen is not None
    assert answer.screen.chosen.strategy == answer.as_it_is.strategy
    (line,) = verdict_lines(answer)
    assert line.startswith("your script as it is: ")
    assert line.endswith(" GiB of 80.0 GiB, fits")


@pytest.mark.parametrize(
    ("memory_gib", "fit"), [(80, "fits"), (6.6, "may fit"), (5.2, "may fit"), (3, "does not fit")]
)
def test_the_verdict_on_a_script_is_open_within_the_uncertainty(memory_gib: float, fit: str) -> None:
    answer = solved(captured_problem(num_gpus=1, memory_gib=memory_gib), screens=True)
    assert verdict_lines(answer)[0].rpartition(", ")[2] == fit


@pytest.mark.parametrize(
    ("name", "fits", "last"),
    [
        ("much room", True, "It fits; --fast leaves open which strategy is the fastest: "),
        ("little host memory", False, "Nothing fits. Nearest is "),
        (
            "nothing to choose",
            True,
            "what fits: one GPU, fused AdamW, batch 8 x 8: 6.9 to 10.3 GiB; trains all weights; "
            "a trace would choose it too",
        ),
    ],
)
def test_the_last_lines_say_what_is_open(name: str, fits: bool, last: str) -> None:
    answer = solved(_PROBLEMS[name], screens=True)
    text = f"{first_screen(answer)}\n\n{table_below(answer, shows_all=True, explains=True)}"
    assert answer.fits == fits
    assert f"\n{last}" in text
    assert ("\n>" in text) == (answer.chosen is not None)


def test_where_all_may_fit_nothing_is_suggested() -> None:
    strategy = {**_SETTLED, "micro_batch_size": 1}
    asked = problem(num_gpus=1, memory_gib=4, global_batch_size=1, spec=spec_of(**strategy))
    peak = solved(asked).head.estimate.device.peak_bytes
    tight = problem(num_gpus=1, memory_gib=peak / 2**30, global_batch_size=1, spec=spec_of(**strategy))
    answer = solved(tight, screens=True)
    assert (answer.fits, answer.chosen, answer.suggestions) == (False, None, ())
    assert "--fast leaves open if anything fits: plan without --fast" in first_screen(answer)


def test_a_family_that_was_not_compared_with_traces_is_less_certain() -> None:
    known, other = (
        _screen(problem(num_gpus=1, memory_gib=4, facts=model(model_type=name)))
        for name in ("llama", "not-seen")
    )
    rows = [row.judged for row in (*known.rows, *other.rows) if not isinstance(row.judged, RuledOut)]
    shares = [row.estimate.device.uncertainty for row in rows if not row.strategy.offloads]
    assert sorted(set(shares)) == [UNCERTAINTY, 0.6]


def test_offload_is_less_certain() -> None:
    rows = _screen(problem(num_gpus=1)).rows
    shares = {
        row.judged.strategy.optimizer_offload: row.judged.estimate.device.uncertainty
        for row in rows
        if not isinstance(row.judged, RuledOut)
    }
    assert shares[OffloadDevice.NONE] < shares[OffloadDevice.CPU]


@pytest.mark.parametrize(
    ("of_need", "fit"), [(0.8, Fit.TOO_LARGE), (0.9, Fit.MAY_FIT), (1.1, Fit.MAY_FIT), (1.2, Fit.FITS)]
)
def test_host_memory_has_an_uncertainty_of_its_own(of_need: float, fit: Fit) -> None:
    offloaded = spec_of(
        zero_stage=ZeroStage.PARAMETERS, optimizer_offload=OffloadDevice.CPU, param_offload=OffloadDevice.CPU
    )
    fields: dict[str, Any] = {"facts": LARGE, "num_gpus": 1, "global_batch_size": 1, "spec": offloaded}
    needed = solved(problem(**fields)).head.estimate.host.peak_bytes
    assert _screen(problem(**fields, host_gib=of_need * needed / 2**30)).fit is fit
