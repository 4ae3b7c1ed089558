"""What plan prints in a terminal of 80 columns: every word of it, in lines of at most 80 columns, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from captured_scripts import captured_problem
from planning_problems import LARGE, problem, solved, spec_of

from zerofit.cli.output.plan_compare import plan_comparison
from zerofit.cli.output.plan_why import plan_why
from zerofit.core.strategy import Engine, OffloadDevice, ZeroStage
from zerofit.core.text_table import wrapped
from zerofit.machine.gpu_catalog import load_gpus
from zerofit.planning.answer_lines import as_it_is_lines
from zerofit.planning.applied_table import applied_rows, applied_table
from zerofit.planning.layout_table import layout_table
from zerofit.planning.plan_table import plan_table
from zerofit.planning.screen_table import first_screen, table_below, verdict_lines
from zerofit.planning.solve import Answer

_GPUS = tuple(gpu.spec for gpu in load_gpus())
_STAGE_3 = spec_of(zero_stage=ZeroStage.PARAMETERS, optimizer_offload=OffloadDevice.CPU)
_TOO_SMALL = {"facts": LARGE, "num_gpus": 1, "memory_gib": 4, "host_gib": 8, "global_batch_size": 2}
_FIXED = spec_of(engine=Engine.NATIVE)
_ANSWERS: dict[str, Callable[[], Answer]] = {
    "fits": lambda: solved(problem(num_gpus=8, machine_fields={"nvme_bytes": 10**13})),
    "offloads": lambda: solved(problem(facts=LARGE, num_gpus=1, memory_gib=24, global_batch_size=2)),
    "fits on fixed terms": lambda: solved(problem(num_gpus=4, spec=_STAGE_3)),
    "nothing fits": lambda: solved(problem(**_TOO_SMALL), gpus=_GPUS),
    "nothing fits with what was asked": lambda: solved(
        problem(facts=LARGE, num_gpus=2, memory_gib=24, global_batch_size=8, spec=_FIXED),
        gpus=_GPUS,
    ),
    "the host is too small": lambda: solved(
        problem(facts=LARGE, num_gpus=1, memory_gib=24, host_gib=24), gpus=_GPUS
    ),
    "a screen": lambda: solved(
        problem(facts=LARGE, num_gpus=2, memory_gib=28, global_batch_size=8), screens=True
    ),
    "a screen of what does not fit": lambda: solved(
        problem(**_TOO_SMALL),
        gpus=_GPUS,
        screens=True,
    ),
    "a script": lambda: solved(captured_problem(num_gpus=2)),
    "a script that does not fit": lambda: solved(captured_problem(num_gpus=1, memory_gib=2), gpus=_GPUS),
    "layouts": lambda: solved(problem(num_gpus=4, sequence_length=4096), compares_layouts=True),
}
_LIKE_ANOTHER = (
    *("fits on fixed terms", "nothing fits with what was asked", "the host is too small"),
    "a screen of what does not fit",
)
"""Slow: tables of the kinds that the others have."""
_NAMES = [pytest.param(name, marks=pytest.mark.slow if name in _LIKE_ANOTHER else ()) for name in _ANSWERS]


@cache
def _answer(name: str) -> Answer:
    return _ANSWERS[name]()


def _whole(answer: Answer, width: int | None) -> str:
    """Return all that plan prints, with --why."""
    parts = [first_screen(answer, command="zerofit launch train.py", width=width)]
    parts += [table_below(answer, shows_all=True, explains=True, width=width)]
    parts += [layout_table(answer, width=width)] if answer.layouts else []
    if answer.problem.script is not None and answer.chosen is not None:
        parts.append(applied_table(applied_rows(answer.plan), width=width))
    return "\n\n".join([*parts, plan_why(answer, width=width), plan_comparison([answer], width=width)])


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("name", _NAMES)
def test_no_line_is_too_long_and_none_is_cut(name: str, width: int) -> None:
    text = _whole(_answer(name), width)
    too_long = [line for line in text.splitlines() if len(line) > width and " " in line.strip()]
    assert too_long == []  # but a link or a command, which are no words of a sentence
    assert not [word for word in text.split() if word.endswith(("…", "...")) and not word.endswith("....")]


@pytest.mark.parametrize("name", _NAMES)
def test_reasons_have_all_their_words_at_80_columns(name: str) -> None:
    """A narrow table abbreviates strategies and leaves columns out; what follows it is the same text."""
    answer = _answer(name)
    for part in (plan_why, lambda answer, width: "\n".join(wrapped(verdict_lines(answer), width))):
        narrow, wide = (Counter("".join(part(answer, width=width).split())) for width in (80, None))
        assert narrow == wide
    if answer.problem.script is not None and answer.chosen is not None:
        rows = applied_rows(answer.plan)
        narrow, wide = (Counter(applied_table(rows, width=width).split()) for width in (80, None))
        assert set(wide - narrow) <= {"why"}, "the header of what then stands below the others"


@pytest.mark.parametrize("name", _NAMES)
def test_a_verdict_is_printed_once(name: str) -> None:
    answer = _answer(name)
    text = "\n".join([*as_it_is_lines(answer), plan_table(answer, width=80)])
    assert text.count("Nothing fits.") == (not answer.found.chosen)
    assert text.count("your script as it is") == (answer.as_it_is is not None)
    said = [
        line for line in text.splitlines() if line.startswith(("what fits", "your script", "as your files"))
    ]
    assert len(said) == len(set(said))


@pytest.mark.parametrize(
    "change",
    [{}, {"gradient_checkpointing": False}, {"micro_batch_size": 2}, {"zero_stage": ZeroStage.GRADIENTS}],
)
def test_the_shortage_of_the_nearest_is_whole(change: dict[str, object]) -> None:
    asked = problem(
        facts=LARGE, num_gpus=1, memory_gib=4, host_gib=8, global_batch_size=2, spec=spec_of(**change)
    )
    answer = replace(solved(asked), suggestions=())
    text = " ".join(plan_table(answer, width=80).split())
    assert "Nothing fits. Nearest is" in text
    assert answer.head.shortage in text
