"""python -m tools.write_readme_picture: plans README's first command, and draws memory beside step time.

The plan takes minutes. docs/one_card.svg in the current folder is written anew.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import zerofit
from zerofit.configs.write.write_files import write_files
from zerofit.core.units import GIB
from zerofit.planning.plan_labels import batch, kind_label, memory_label, step_time_label, workload_words

if TYPE_CHECKING:
    from zerofit.planning.search import EstimatedStrategy
    from zerofit.planning.solve import Answer

README, PICTURE = Path("README.md"), Path("docs/one_card.svg")
_WIDTH, _ROW, _TOP = 940, 46, 64
_NAMES, _MEMORY, _TIME = 12, 320, 668
"""Where the names, the bars of memory and the bars of time begin, in pixels from the left."""
_MEMORY_WIDTH, _TIME_WIDTH = 210, 130
_BLUE, _GREY, _RED, _INK, _SOFT = "#0072b2", "#9a9a9a", "#d55e00", "#1b1f24", "#59636e"
"""Okabe and Ito's, which the colour-blind tell apart: https://jfly.uni-koeln.de/color/"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One strategy of the picture."""

    name: str
    note: str
    gib: float
    memory: str
    seconds: float
    time: str
    """Empty for one that does not fit: it takes no step."""
    is_chosen: bool


def first_command(readme: str) -> list[str]:
    """Return the words of README's first `zerofit plan`, without the program and the verb."""
    session = readme.partition("$ zerofit plan ")[2].partition("\nyour script")[0]
    return shlex.split(session.replace("\\\n", " "))


def first_plan(readme: str) -> Answer:
    """Return the plan of README's first command."""
    words = first_command(readme)
    flags = {"--gpus": words[words.index("--gpus") + 1]}
    at = words.index("--gpus") + 2
    answer: Answer = zerofit.plan(*words[at:], gpus=flags["--gpus"])
    return answer


def bars(answer: Answer) -> tuple[Bar, ...]:
    """Return the script as it is, the choice, the choice in 16 bits, and the fastest with offload."""
    own, chosen = answer.as_it_is, answer.found.chosen
    assert own is not None
    assert chosen is not None
    found = [_bar("as it is", own), _bar("zerofit's choice", chosen, is_chosen=True)]
    if answer.in_16_bits is not None:
        found.append(_bar("with --mixed-precision bf16", answer.in_16_bits))
    offloaded = [judged for judged in answer.found.others if judged.fits and judged.strategy.offloads]
    found += [_bar(kind_label(judged.strategy, answer.problem.topology), judged) for judged in offloaded[:1]]
    return tuple(found)


def picture(rows: tuple[Bar, ...], *, card_gib: float, title: str) -> str:
    """Return the SVG: a row for each strategy, memory beside the time of a step."""
    height = _TOP + _ROW * len(rows) + 24
    memory_scale = _MEMORY_WIDTH / max(*(row.gib for row in rows), card_gib)
    time_scale = _TIME_WIDTH / max(row.seconds for row in rows)
    card = _MEMORY + card_gib * memory_scale
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="system-ui, sans-serif" font-size="14" fill="{_INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_NAMES, 22, title, weight="600"),
        _text(_MEMORY, 50, "memory at its peak", colour=_SOFT),
        _text(_TIME, 50, "time of a step", colour=_SOFT),
    ]
    for number, row in enumerate(rows):
        lines += _row(row, _TOP + number * _ROW, memory_scale, time_scale, card_gib)
    lines += [
        f'<path d="M{card:.1f} {_TOP - 6}V{height - 24}" stroke="{_INK}" stroke-width="1.5"/>',
        _text(card - 4, height - 8, f"the card: {card_gib:.1f} GiB"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def alternative(rows: tuple[Bar, ...], *, card_gib: float) -> str:
    """Return what the picture says, for those who don't see it."""
    parts = [
        f"{row.name} {row.memory}, {row.time or 'does not fit'}{' (chosen)' if row.is_chosen else ''}"
        for row in rows
    ]
    return f"Memory and step time on a card of {card_gib:.1f} GiB: {'; '.join(parts)}"


def _bar(name: str, judged: EstimatedStrategy, *, is_chosen: bool = False) -> Bar:
    device, step = judged.estimate.device, judged.estimate.step_time
    assert step is not None
    return Bar(
        name=name,
        note=f"batch {batch(judged.strategy)}".removesuffix(" x 1"),
        gib=device.peak_bytes / GIB,
        memory=memory_label(device).replace(" ±", " GiB ±"),
        seconds=step.seconds if judged.fits else 0.0,
        time=step_time_label(step) if judged.fits else "",
        is_chosen=is_chosen,
    )


def _row(row: Bar, top: int, memory_scale: float, time_scale: float, card_gib: float) -> list[str]:
    colour = _RED if row.gib > card_gib else _BLUE if row.is_chosen else _GREY
    long, short = row.gib * memory_scale, row.seconds * time_scale
    weight = "600" if row.is_chosen else "400"
    lines = [
        _text(_NAMES, top + 14, row.name, weight=weight),
        _text(_NAMES, top + 32, row.note, colour=_SOFT),
        f'<rect x="{_MEMORY}" y="{top + 3}" width="{long:.1f}" height="22" fill="{colour}"/>',
        # Beside the bar, or the line of the card if that is further right.
        _text(
            max(_MEMORY + long, _MEMORY + card_gib * memory_scale) + 8, top + 19, row.memory, weight=weight
        ),
    ]
    if not row.time:
        return [*lines, _text(_TIME, top + 19, "does not fit", colour=_RED)]
    bar = f'<rect x="{_TIME}" y="{top + 3}" width="{short:.1f}" height="22" fill="{colour}"/>'
    return [*lines, bar, _text(_TIME + short + 8, top + 19, row.time, weight=weight)]


def _text(left: float, base: float, words: str, *, weight: str = "400", colour: str = _INK) -> str:
    return (
        f'<text x="{left:.0f}" y="{base:.0f}" font-weight="{weight}" fill="{colour}">{escape(words)}</text>'
    )


def rendered(readme: str) -> tuple[str, str]:
    """Return the picture of README's first command, and its alternative text."""
    answer = first_plan(readme)
    rows, card_gib = bars(answer), answer.problem.card_bytes / GIB
    gpu = answer.problem.machine.gpus[0].name.removeprefix("NVIDIA ")
    title = f"{workload_words(answer.problem)}, on one {gpu}"
    return picture(rows, card_gib=card_gib, title=title), alternative(rows, card_gib=card_gib)


if __name__ == "__main__":
    drawn, words = rendered(README.read_text("utf-8"))
    write_files({PICTURE: drawn}, force=True)
    print(words)
