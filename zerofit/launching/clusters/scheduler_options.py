"""The user's own options for a scheduler, --scheduler-option NAME=VALUE: how they are read and refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FLAG = "--scheduler-option"
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
"""Characters that end a line for a scheduler, or can't be seen on a terminal."""
_LONGEST = 1000
"""Characters of a value. ASSUMPTION: sbatch reads lines of at most 4096 (slurm/src/sbatch/opt.c)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOption:
    """An option as the user typed it."""

    name: str
    value: str | None
    """None without "="."""

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"


def parse_options(texts: Iterable[str]) -> tuple[SchedulerOption, ...]:
    """Return options by their texts, "NAME" or "NAME=VALUE"; leading hyphens are left out.

    Raises:
        UserError: one has a character that could begin a new line, is too long, or is given twice.
    """
    found: dict[str, SchedulerOption] = {}
    for text in texts:
        name, joint, value = text.lstrip("-").partition("=")
        option = SchedulerOption(name=name.strip(), value=value if joint else None)
        if _CONTROL.search(text) or len(text) > _LONGEST or not option.name:
            raise refused(
                repr(text[:80]),
                why=f"an option is one line of at most {_LONGEST} characters, with a name",
                fix=f"write it as in {FLAG} NAME=VALUE",
            )
        if option.name in found:
            raise refused(
                f"{found[option.name]} and {option}",
                why="the scheduler would use one of the two",
                fix="leave one of them out",
            )
        found[option.name] = option
    return tuple(found.values())


def refused(found: str, *, why: str, fix: str) -> UserError:
    """Return the error for an option that can't be passed on."""
    return UserError(
        "scheduler-option",
        "an option for the scheduler can't be passed on",
        found=f"{FLAG} {found}",
        why=why,
        fix=fix,
    )


def check_not_own(option: SchedulerOption, own: Mapping[str, str]) -> None:
    """Check that zerofit does not set an option itself.

    Args:
        option: the user's.
        own: names that zerofit sets, and what to do instead.

    Raises:
        UserError: it does.
    """
    if option.name in own:
        why = "`zerofit submit` sets it itself, or relies on it as it is"
        raise refused(str(option), why=why, fix=own[option.name])


def unknown_option(option: SchedulerOption, known: Iterable[str], *, of: str) -> UserError:
    """Return the error for an unknown option, with the nearest known one.

    Args:
        option: the user's.
        known: names that are known.
        of: what they are options of: "a pod".
    """
    names = sorted(known)
    near = nearest(option.name, names)
    fix = f"did you mean {near}?" if near else f"use one of {', '.join(names)}"
    return refused(str(option), why=f"it is no option of {of} that zerofit can set", fix=fix)


def yaml_value(option: SchedulerOption) -> Any:
    """Return the value of an option, which is YAML.

    Raises:
        UserError: it has none, or can't be read.
    """
    import yaml

    try:
        if option.value is None or (value := yaml.safe_load(option.value)) is None:
            raise ValueError
    except (yaml.YAMLError, ValueError):
        raise refused(
            str(option),
            why="it needs a value, in YAML",
            fix=f"""write it as in {FLAG} '{option.name}=text' or '{option.name}=[{{key: value}}]'""",
        ) from None
    return value
