"""A page of HTML in one file: its style and script are inside, and it asks for nothing from elsewhere.

Text is escaped where an element is made of it: what is not Html is text of others.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
from typing import TYPE_CHECKING

from zerofit.configs.write.write_files import check_can_write, write_bytes
from zerofit.core.bounded_read import open_regular
from zerofit.core.foreign_text import printable
from zerofit.core.units import format_bytes
from zerofit.planning.answer_lines import COMMAND
from zerofit.planning.plan_labels import seconds
from zerofit.planning.plan_table import GROUPS, group_of, grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from zerofit.core.estimates import Estimate, MemoryEstimate, PhaseMemory, StepTime, Term, TimeTerm
    from zerofit.core.plan import Reason


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


_BEGIN = "<!DOCTYPE html>\n<!-- written by zerofit, which may write it anew -->\n"
_FLAG = "--html FILE"
_VOID = frozenset({"br", "meta"})

_FOLDER = os.path.dirname(__file__)


def element(name: str, *children: object, **attributes: object) -> Html:
    """Return an element; children that are not Html, and all attributes, are escaped.

    Args:
        name: of the element.
        children: Html, or text; None is left out.
        attributes: `class_` stands for class, `data_value` for data-value; None is left out, True has no
            value.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            word = key.rstrip("_").replace("_", "-")
            words.append(word if value is True else f'{word}="{_escaped(value)}"')
    opened = f"<{' '.join(words)}>"
    if name in _VOID:
        return Html(opened)
    inner = "".join(
        child if isinstance(child, Html) else _escaped(child) for child in children if child is not None
    )
    return Html(f"{opened}{inner}</{name}>")


def joined(parts: Iterable[Html]) -> Html:
    """Return elements after each other."""
    return Html("\n".join(parts))


def _escaped(text: object) -> str:
    return html.escape(printable(str(text)))


def page(title: str, *parts: Html) -> str:
    """Return a whole page.

    Its policy allows its own style and the one script by its digest: no other script runs, and nothing
    is fetched, whatever a name contains.
    """
    style, script = (_read(name) for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )
    head = joined(
        [
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name_="color-scheme", content="light dark"),
            element("title", title),
            Html(f"<style>\n{style}</style>"),
        ]
    )
    body = joined([element("main", *parts), Html(f"<script>{script}</script>")])
    return f'{_BEGIN}<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _read(name: str) -> str:
    """Return the text of a file beside this one."""
    with open(os.path.join(_FOLDER, name), encoding="utf-8") as file:
        return file.read()


def answer_box(lines: Sequence[str], *, is_bad: bool) -> Html:
    """Return the answer in a box, the first line large; indented lines belong to the one before.

    Lines that are indented as commands are shown as such.
    """
    shown = (
        element("code", line.strip())
        if line.startswith(COMMAND)
        else element("p", line.strip(), class_="more" if line.startswith(" ") else None)
        for line in lines
    )
    return element("div", *shown, class_="answer bad" if is_bad else "answer")


def bars(rows: Iterable[tuple[object, Html, object]]) -> Html:
    """Return rows of a name, a bar and a number."""
    shown = (
        element("div", element("span", name), drawn, element("span", number), class_="row")
        for name, drawn, number in rows
    )
    return joined(shown)


def bar(
    segments: Iterable[tuple[str, str, float]],
    *,
    whole: float,
    lines: Iterable[tuple[str, float]] = (),
    error: tuple[float, float] | None = None,
    says: str = "",
    is_small: bool = False,
) -> Html:
    """Return a bar of segments.

    Args:
        segments: style, text and size of each.
        whole: the size that is as wide as the bar's place.
        lines: style and place of each line across it.
        error: both ends of its uncertainty.
        says: the same in words.
        is_small: True in a table, where a letter needs more of the width.
    """
    least = 0.12 if is_small else 0.055
    drawn = [
        element("i", text if size > least * whole else "", class_=style, style=f"width:{_share(size, whole)}")
        for style, text, size in segments
    ]
    if error is not None:
        width = _share(error[1] - error[0], whole)
        drawn.append(element("s", style=f"left:{_share(error[0], whole)};width:{width}"))
    drawn += [element("b", class_=style, style=f"left:{_share(place, whole)}") for style, place in lines]
    return element("span", *drawn, class_="bar", role="img", aria_label=says, title=says)


def _share(size: float, whole: float) -> str:
    return f"{100 * size / whole:.2f}%" if whole else "0%"


def memory_bar(
    phase: PhaseMemory,
    *,
    whole: float,
    lines: Iterable[tuple[str, float]],
    error: float = 0.0,
    is_small: bool = False,
) -> Html:
    """Return the memory of a phase by group; the last group's end has its uncertainty, relative."""
    groups = grouped(phase)
    total = phase.total_bytes
    says = ", ".join(f"{group.name} {format_bytes(size)}" for group, size in groups)
    return bar(
        [(group.letter, group.letter, size) for group, size in groups],
        whole=whole,
        lines=lines,
        error=(total * (1 - error), total * (1 + error)) if error else None,
        says=f"{says}; {format_bytes(total)} in all",
        is_small=is_small,
    )


def legend(*more: tuple[str, str]) -> Html:
    """Return what the letters of the bars mean.

    Args:
        more: style and meaning of other segments.
    """
    meanings = [
        *((group.letter, group.letter, group.name) for group in GROUPS),
        *((k, "", v) for k, v in more),
    ]
    return element(
        "p",
        *(
            element("span", element("span", element("i", text, class_=style), class_="bar"), name)
            for style, text, name in meanings
        ),
        class_="legend",
    )


def time_bars(step_time: StepTime) -> Html:
    """Return the parts of a step's time, the longest first."""
    terms = sorted(step_time.terms, key=lambda term: -term.seconds)
    longest = max((term.seconds for term in terms), default=0.0)
    return bars(
        (
            term.name,
            bar([("T", "", max(term.seconds, 0.0))], whole=longest, says=seconds(term.seconds)),
            seconds(term.seconds),
        )
        for term in terms
        if term.seconds > step_time.seconds / 1000
    )


def table(
    header: Sequence[str],
    rows: Iterable[Html],
    *,
    caption: str = "",
    numbers: Sequence[int] = (),
    sorts: bool = True,
) -> Html:
    """Return a table that a click on a header sorts.

    Args:
        header: names of the columns.
        rows: made by `table_row`.
        caption: above it.
        numbers: places of columns that are numbers.
        sorts: False for one that is read in its order.
    """
    heads = (
        element("th", name, scope="col", class_="num" if place in numbers else None)
        for place, name in enumerate(header)
    )
    return element(
        "div",
        element(
            "table",
            element("caption", caption) if caption else None,
            element("thead", element("tr", *heads)),
            element("tbody", joined(rows)),
            class_="sorts folds" if sorts else "folds",
        ),
        class_="wide",
    )


def table_row(header: Sequence[str], cells: Sequence[tuple[object, object, str]], *, style: str = "") -> Html:
    """Return a row.

    Args:
        header: names of the columns.
        cells: content, the value that it is sorted by (None: its text), and style of each.
        style: of the row.
    """
    shown = (
        element("td", content, data_value=value, class_=kind or None, data_name=name)
        for name, (content, value, kind) in zip(header, cells, strict=True)
    )
    return element("tr", *shown, class_=style or None)


_REASONS = ("setting", "why", "by")


def reasons_table(reasons: Iterable[Reason]) -> Html:
    """Return the reason of each setting of a plan."""
    rows = (
        table_row(
            _REASONS,
            [
                (f"{reason.field} = {reason.value}", None, ""),
                (reason.why, None, "long"),
                (reason.origin.value, None, ""),
            ],
        )
        for reason in reasons
    )
    return table(_REASONS, rows)


_TERMS = ("bytes", "term", "formula", "source")
_TIMES = ("time", "term", "formula", "source")


def estimate_terms(estimate: Estimate) -> Html:
    """Return each term of a plan's memory and time with its formula and source."""
    parts = [
        _memory_terms("memory of each GPU", estimate.device),
        _memory_terms("memory of each host", estimate.host),
    ]
    return joined([*parts, _time_terms(estimate.step_time)] if estimate.step_time else parts)


def _memory_terms(title: str, estimate: MemoryEstimate) -> Html:
    """Return each term of each phase with its formula and source; the peak's phase is open."""
    parts = []
    for phase in estimate.phases:
        is_peak = phase is estimate.peak
        words = f"{title}, {phase.phase.value}: {format_bytes(phase.total_bytes)}"
        rows = map(_memory_term, sorted(phase.terms, key=lambda term: -term.num_bytes))
        parts.append(
            element(
                "details",
                element("summary", f"{words}, the peak" if is_peak else words),
                table(_TERMS, rows, numbers=(0,)),
                open_=is_peak,
            )
        )
    source = f"±{estimate.uncertainty:.0%}: {estimate.uncertainty_source}"
    return joined([element("p", source, class_="soft"), *parts])


def _memory_term(term: Term) -> Html:
    letter = group_of(term.name).letter
    mark = element("span", element("i", letter, class_=letter, style="width:1.2rem"), class_="bar")
    name = element("span", mark, " ", term.name, class_="term")
    return table_row(
        _TERMS,
        [
            (format_bytes(term.num_bytes), term.num_bytes, "num"),
            (name, term.name, ""),
            (term.formula, None, "long"),
            (term.source, None, "long"),
        ],
    )


def _time_terms(step_time: StepTime) -> Html:
    """Return each term of a step's time with its formula and source."""
    rows = map(_time_term, sorted(step_time.terms, key=lambda term: -term.seconds))
    words = f"step time: {seconds(step_time.seconds)} ±{step_time.uncertainty:.0%}"
    source = f"±{step_time.uncertainty:.0%}: {step_time.uncertainty_source}"
    return element(
        "details",
        element("summary", words),
        element("p", source, class_="soft"),
        table(_TIMES, rows, numbers=(0,)),
    )


def _time_term(term: TimeTerm) -> Html:
    cells = [
        (seconds(term.seconds), term.seconds, "num"),
        (term.name, None, ""),
        (term.formula, None, "long"),
        (term.source, None, "long"),
    ]
    return table_row(_TIMES, cells)


def check_can_write_page(path: Path, *, force: bool) -> None:
    """Check early that a page can be written; over one that zerofit wrote it may be.

    Raises:
        UserError: another file exists there, or its folder is not writable.
    """
    check_can_write(path, force=force or _is_own(path), flag=_FLAG)


def _is_own(path: Path) -> bool:
    """Return True if a file is a page that zerofit wrote."""
    try:
        with open_regular(path) as file:
            return file.read(len(_BEGIN)) == _BEGIN.encode()
    except OSError:
        return False


def write_page(path: Path, text: str) -> None:
    """Write a page to a file, creating its folder; `check_can_write_page` was asked before.

    Raises:
        UserError: the file can't be written.
    """
    write_bytes(path, text.encode("utf-8", errors="replace"), flag=_FLAG)
