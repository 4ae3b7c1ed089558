"""Finds zerofit's flags after the script that the script itself does not know."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.configs.schemas.catalog import load_schema
from zerofit.core.errors import UserError
from zerofit.scripts.flag_names import flag_names

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_misplaced_flags(
    target: tuple[str, ...], *, before: tuple[str, ...], flags: Mapping[str, bool]
) -> None:
    """Check that no flag of the verb follows a script whose source does not contain it.

    A script that ignores its arguments would train despite a --dry-run after it. Only the source is searched:
    the script's, and that of local modules that it imports.

    Args:
        target: the script and its arguments.
        before: the words of the command line before the script.
        flags: long names of the verb's flags, with hyphens, and True for those with a value.

    Raises:
        UserError: there is such a flag; the fix is the whole command.
    """
    script, *arguments = target
    spelled = {word: word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")}
    misplaced = [word for word, flag in spelled.items() if flag in flags]
    if not misplaced or not script.endswith(".py"):
        return
    known = flag_names(script)
    if known.takes_any:
        return
    if known.takes_training_arguments:
        fields = (key.name for key in load_schema("training_arguments").root.keys)
        known = replace(known, names=known.names.union(fields))
    unknown = [word for word in misplaced if not known.has(spelled[word])]
    if unknown:
        raise _misplaced(unknown, target, before, valued={word for word in unknown if flags[spelled[word]]})


def _misplaced(
    unknown: list[str], target: tuple[str, ...], before: tuple[str, ...], *, valued: set[str]
) -> UserError:
    script, *rest = target
    moved = []
    for word in unknown:
        at = rest.index(word)
        end = at + (2 if word in valued and "=" not in word else 1)
        moved += rest[at:end]
        del rest[at:end]
    named = ", ".join(unknown)
    return UserError(
        "flag-behind-script",
        f"a zerofit flag follows {script}, which does not know it",
        found=f"{script} ... {named}",
        why=f"arguments after the script belong to it, but its source has no {named}",
        fix=shlex.join([*before, *moved, script, *rest]),
    )
