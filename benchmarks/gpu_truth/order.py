"""Options of one run of the harness: output folder, time budget, sections."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpu_truth.results import Section
from zerofit.core.errors import UserError

_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Options of one run of the harness."""

    out: Path
    """Takes the results, the table and the plot."""
    budget_s: float
    """How long all of it may take, from the start of the program."""
    sections: tuple[Section, ...]
    on_cpu: bool
    anew: bool = False
    """True if what is there is measured again; each result stays until there is a newer one."""
    lookahead: int | None = None
    """Processes that import ahead; None chooses by the number of cores."""
    logs: Path | None = None
    """Takes what the processes print; None keeps nothing of it."""


def parse_budget(text: str) -> float:
    """Return the seconds of "9m", "540s" or "1h".

    Raises:
        ValueError: it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if not found or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is no time: say it as 540s, 9m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def parse_sections(text: str) -> tuple[Section, ...]:
    """Return the sections that a text names, with commas between, in the order in which they run.

    Raises:
        ValueError: one is not known, or none is named.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [section.value for section in Section]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no section {', '.join(unknown)}: they are {', '.join(known)}")
    if not names:
        raise ValueError(f"no section is named: they are {', '.join(known)}")
    return tuple(section for section in Section if section.value in names)


def make_folder(folder: Path, flag: str) -> None:
    """Make a folder where it is missing, and try that it takes files.

    Args:
        folder: its path.
        flag: what named it.

    Raises:
        UserError: it can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            "folder-not-writable",
            "a folder for what is measured can't be written",
            found=f"{flag} {folder}",
            why=error.strerror or str(error),
            fix="name a folder that takes files",
        ) from None
