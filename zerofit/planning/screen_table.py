"""The screen of `plan --fast` as text: what fits, may fit or is too large, and no choice that is open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.text_table import table_lines, wrapped
from zerofit.core.units import format_bytes
from zerofit.planning.answer_lines import (
    COMMAND,
    answer_lines,
    as_it_is_lines,
    as_it_is_name,
    head_lines,
    hint_lines,
    nothing_fits_lines,
    own_terms_line,
)
from zerofit.planning.cost import cost_line
from zerofit.planning.plan_labels import batch, gib, kind_label, label, range_label
from zerofit.planning.plan_table import (
    answer_html,
    is_narrow,
    legend_lines,
    plan_table,
    short_label,
    table_as_html,
)
from zerofit.planning.screen import Fit, fit_of
from zerofit.planning.search import RuledOut
from zerofit.planning.suggestions import effect_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.planning.screen import Screen, Screened
    from zerofit.planning.search import EstimatedStrategy
    from zerofit.planning.solve import Answer

_HEADER = ("", "strategy", "batch", "GiB needed", "host GiB", "verdict")
_INSTEAD = "plan without --fast, which traces the model"
_LESS_IMPORTANT = (2, 4)
"""Columns to leave out first in a narrow terminal: batch, host."""
_NEEDED = "GiB needed: tensors and CUDA context; PyTorch's allocator may cache more while there is room"


def verdict_lines(answer: Answer) -> list[str]:
    """Return the verdicts on the unchanged script and on its files, and what runs if that is known."""
    if answer.screen is None:
        return as_it_is_lines(answer)
    own = as_it_is_name(has_files=answer.as_files_say is not None)
    said = (("as your files say", answer.as_files_say), (own, answer.as_it_is))
    return [f"{name}: {fit_words(judged, answer)}" for name, judged in said if judged is not None]


def first_screen(
    answer: Answer, *, command: str = "", price: float | None = None, width: int | None = None
) -> str:
    """Return the answer of `zerofit plan`: what there is, what fits, the command to paste, and hints.

    Args:
        command: what trains it; empty for none.
        price: of a GPU-hour; None if unknown.
        width: columns of the terminal; None for no limit.
    """
    head = [] if answer.problem.script is not None else [*head_lines(answer)]
    if answer.screen is not None:
        lines = [*head, *verdict_lines(answer), *_last(answer, answer.screen)]
    elif answer.fits:
        lines = [*head, *answer_lines(answer)]
    else:
        lines = [*head, *answer_lines(answer), *nothing_fits_lines(answer)]
    if price is not None:
        lines.append(cost_line(answer, price))
    parts = (
        wrapped(lines, width, whole=COMMAND),
        [f"{COMMAND}{command}"] if command else [],
        wrapped(hint_lines(answer), width) if answer.screen is None else (),
    )
    return "\n\n".join("\n".join(shown) for part in parts if (shown := list(part)))


def table_below(answer: Answer, *, shows_all: bool, explains: bool, width: int | None = None) -> str:
    """Return the table of strategies below the answer of `zerofit plan`.

    Args:
        shows_all: True for the terms of the peak memory too.
        explains: True for what ± means and where it is from.
        width: columns of the terminal; None for no limit.
    """
    has_head = answer.problem.script is not None  # otherwise it is above
    if answer.screen is not None:
        return _screen_table(answer, answer.screen, width=width, has_head=has_head)
    table = plan_table(
        answer,
        width=width,
        has_head=has_head,
        has_peak=shows_all,
        has_bounds=explains,
        has_misfit=False,
    )
    own = own_terms_line(answer) if shows_all else ""
    return "\n\n".join((*(["\n".join(wrapped([own], width))] if own else []), table))


def _screen_table(answer: Answer, screen: Screen, *, width: int | None, has_head: bool) -> str:
    rows = _cells(answer, screen, is_short=is_narrow(width))
    shown = table_lines(rows, width=width, leaves_out=_LESS_IMPORTANT)
    parts = (
        wrapped(head_lines(answer), width) if has_head else (),
        shown,
        wrapped(_legend(answer, columns=shown[0]), width),
    )
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def table_html(answer: Answer) -> str:
    """Return the same as HTML, for notebooks."""
    if answer.screen is None:
        return answer_html(answer)
    return table_as_html(
        head_lines(answer),
        _cells(answer, answer.screen, is_short=False),
        (_legend(answer, columns=" ".join(_HEADER)), _last(answer, answer.screen)),
    )


def not_chosen(screen: Screen) -> str:
    """Return why a screen names no choice."""
    if screen.fit is Fit.TOO_LARGE:
        return "nothing fits"
    what = "if anything fits" if screen.fit is Fit.MAY_FIT else "which strategy is the fastest"
    return f"--fast leaves open {what}"


def fit_words(judged: EstimatedStrategy, answer: Answer) -> str:
    """Return what a strategy needs beside its limit: "43.3 to 64.9 GiB of 79.2 GiB, fits"."""
    problem = answer.problem
    device, host = judged.estimate.device, judged.estimate.host
    fit = fit_of(judged, problem)
    where = " on each GPU" if problem.topology.world_size > 1 else ""
    words = f"{range_label(device)} GiB of {format_bytes(problem.card_bytes)}{where}"
    if host.upper_bytes > problem.host_bytes:
        words += f", {range_label(host)} GiB of {format_bytes(problem.host_bytes)} of host memory"
    return f"{words}, {'does not fit' if fit is Fit.TOO_LARGE else fit.value}"


def _cells(answer: Answer, screen: Screen, *, is_short: bool) -> list[list[str]]:
    rows = [[*_HEADER], *(_row(answer, row, screen) for row in screen.rows)]
    for row in rows if is_short else ():
        row[1] = short_label(row[1])
    return rows


def _row(answer: Answer, row: Screened, screen: Screen) -> list[str]:
    judged, topology, verdict = row.judged, answer.problem.topology, row.fit.value
    if isinstance(judged, RuledOut):
        name, least = kind_label(judged.strategy, topology), gib(judged.least_bytes)
        return ["", name, "-", f"at least {least}", "-", verdict]
    if row.fit is Fit.TOO_LARGE and judged.estimate.device.upper_bytes <= answer.problem.device_bytes:
        verdict += " for host or disks"
    is_chosen = screen.chosen is not None and judged.strategy == screen.chosen.strategy
    return [
        ">" if is_chosen else "",
        label(judged.strategy, topology),
        batch(judged.strategy),
        range_label(judged.estimate.device),
        range_label(judged.estimate.host),
        verdict,
    ]


def _legend(answer: Answer, *, columns: str) -> Iterator[str]:
    yield from legend_lines(answer, columns=columns)
    yield _NEEDED
    yield f"from - to: {answer.head.estimate.device.uncertainty_source}"


def _chosen(chosen: EstimatedStrategy, answer: Answer) -> str:
    problem, strategy = answer.problem, chosen.strategy
    own = None if answer.as_it_is is None else answer.as_it_is.strategy
    needs = f"{range_label(chosen.estimate.device)} GiB"
    words = f"{label(strategy, problem.topology)}, batch {batch(strategy)}: {needs}"
    effect = effect_of(strategy, problem, own=own, cut_to=answer.cut_to)
    return f"what fits: {words}; {effect}; a trace would choose it too"


def _last(answer: Answer, screen: Screen) -> Iterator[str]:
    if screen.fit is Fit.TOO_LARGE:
        yield from nothing_fits_lines(answer)
    elif screen.chosen is not None:
        yield _chosen(screen.chosen, answer)
    else:
        yield f"{'It fits; ' if screen.fit is Fit.FITS else ''}{not_chosen(screen)}: {_INSTEAD}"
