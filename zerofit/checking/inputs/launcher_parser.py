"""argparse as launchers use it, which returns its message for a line that it refuses."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence


class _RefusedLineError(Exception):
    """argparse's message for a line that it refuses."""


class _Switch(argparse.Action):
    """A flag without a value; also --help, which would print and exit."""

    def __init__(self, **more: Any) -> None:
        super().__init__(nargs=0, **more)

    def __call__(self, *_: Any) -> None:
        pass


class LauncherParser(argparse.ArgumentParser):
    """A launcher's parser, which neither prints nor exits."""

    def error(self, message: str) -> NoReturn:
        """Refuse the line."""
        raise _RefusedLineError(message)

    def add_flag(
        self, *options: str, dest: str, kind: type[int] | type[float] | None, is_switch: bool
    ) -> None:
        """Add a flag of the launcher under all its spellings.

        Args:
            options: with their dashes.
            dest: its long name.
            kind: the type of its value; None for any text.
            is_switch: it takes no value.
        """
        if is_switch:
            self.add_argument(*options, dest=dest, action=_Switch)
        else:
            self.add_argument(*options, dest=dest, type=kind or str)

    def refusal(self, words: Sequence[str]) -> str | None:
        """Return argparse's message for words that it refuses; None if it takes them."""
        try:
            self.parse_args(list(words))
        except _RefusedLineError as refused:
            return str(refused)
        return None
