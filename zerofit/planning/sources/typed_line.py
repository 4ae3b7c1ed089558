"""TypedLine: the user's command line, flag by flag, so that it can be changed and typed again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.core.secrets import shell_words
from zerofit.scripts.capture.errors import with_limit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedFlag:
    """One flag with its value."""

    name: str
    """The parameter that it sets: "micro_batch_size"."""
    words: tuple[str, ...]
    """As typed: ("--micro-batch-size", "4"); as a change, empty to leave the flag out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedLine:
    """A command line of zerofit; false if there was none, as in Python."""

    verb: tuple[str, ...] = ()
    """("zerofit", "plan")."""
    flags: tuple[TypedFlag, ...] = ()
    script: tuple[str, ...] = ()
    """The script and its arguments."""

    def __bool__(self) -> bool:
        return bool(self.verb)

    def __str__(self) -> str:
        return shell_words((*self.verb, *(word for flag in self.flags for word in flag.words), *self.script))

    def without(self, names: Collection[str]) -> TypedLine:
        """Return the line without the flags of some parameters."""
        return replace(self, flags=tuple(flag for flag in self.flags if flag.name not in names))

    def changed(self, changes: Iterable[TypedFlag]) -> TypedLine:
        """Return the line with flags replaced, added at the end, or left out; `-m` stays the last."""
        changes = tuple(changes)
        kept = self.without({change.name for change in changes}).flags
        module = tuple(flag for flag in kept if flag.name == "module")
        others = tuple(flag for flag in kept if flag.name != "module")
        return replace(self, flags=(*others, *(change for change in changes if change.words), *module))

    def with_capture_limit(self, limit_s: float) -> str:
        """Return the line with another --capture-limit; the flag alone if there is no line."""
        flag = TypedFlag(name="capture_limit_s", words=("--capture-limit", f"{limit_s:g}"))
        return str(self.changed([flag])) if self else with_limit(limit_s)
