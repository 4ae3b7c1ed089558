"""The flags of each launcher, and what its own parser says of them: argparse, built from the catalog."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from zerofit.configs.schema import ValueKind
from zerofit.core.command import Flag, Launcher, Refusal, RefusedFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.checking.inputs.launcher_parser import LauncherParser
    from zerofit.configs.schema import Key, Schema, Schemas

TORCH_LAUNCH = "torch.distributed.launch"
"""The module with torchrun's flags and a few more."""
_TYPES: dict[ValueKind, type[int] | type[float]] = {ValueKind.INTEGER: int, ValueKind.NUMBER: float}
_SCHEMAS = {
    Launcher.ACCELERATE: "accelerate_launch",
    Launcher.TORCHRUN: "torchrun",
    Launcher.DEEPSPEED: "deepspeed_launcher",
    Launcher.ZEROFIT: "zerofit_launch",
}
_ABBREVIATING = (Launcher.TORCHRUN, Launcher.DEEPSPEED)
_WITHOUT_DASHES = (Launcher.DEEPSPEED,)


def flags_of(launcher: Launcher, schemas: Schemas, *, module: str | None = None) -> LauncherFlags:
    """Return the flags of a launcher.

    Args:
        launcher: any but python.
        schemas: of the releases that will run.
        module: the module that starts the launcher, as with python -m.
    """
    schema: Schema = getattr(schemas, _SCHEMAS[launcher])
    return LauncherFlags(
        keys=tuple(key for key in schema.root.keys if key.reader in ("", module)),
        abbreviates=launcher in _ABBREVIATING,
        takes_dashes=launcher not in _WITHOUT_DASHES,
        schema=schema,
    )


@dataclass(frozen=True, kw_only=True)
class LauncherFlags:
    """How a launcher parses its flags; names are without leading dashes, with underscores."""

    keys: tuple[Key, ...]
    """Its flags; a switch has the one type bool."""
    abbreviates: bool = False
    """True if the launcher accepts unambiguous prefixes of long names."""
    takes_dashes: bool = True
    """True if it treats --num-gpus as --num_gpus."""
    schema: Schema
    """Where the flags come from."""

    @cached_property
    def _by_name(self) -> dict[str, Key]:
        return {name: key for key in self.keys for name in (key.name, *key.aliases)}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names after two dashes, in alphabetical order."""
        return tuple(sorted(name for name in self._by_name if len(name) > 1))

    def key(self, name: str) -> Key | None:
        """Return the flag of a name or alias."""
        return self._by_name.get(name)

    def find(self, name: str) -> str | None:
        """Return the long name that the launcher resolves a name to; None if unknown or ambiguous."""
        if name in self._by_name:
            return self._by_name[name].name
        fitting = self.fitting(name)
        return fitting[0] if len(fitting) == 1 else None

    def fitting(self, name: str) -> tuple[str, ...]:
        """Return the long names that a name abbreviates."""
        if not self.abbreviates or len(name) == 1:
            return ()
        found = (self._by_name[other].name for other in self.names if other.startswith(name))
        return tuple(dict.fromkeys(found))

    def is_switch(self, name: str) -> bool:
        """Return True for the long name of a flag without a value."""
        key = self.key(name)
        return key is not None and is_switch(key)

    def refused(
        self, flags: Sequence[Flag], script: str | None, arguments: Sequence[str], *, is_whole: bool
    ) -> tuple[RefusedFlag, ...]:
        """Return the flags that the launcher's parser refuses, each with the reason.

        Args:
            flags: the line's, as far as they are literal text.
            script: the first word after them; None if there is none.
            arguments: the words after the script.
            is_whole: True if these are all words of the line.
        """
        refused = [found for flag in flags if (found := self._refused_flag(flag)) is not None]
        if refused or not is_whole:
            return tuple(refused)
        if script is None:
            return (RefusedFlag(flag=None, why=Refusal.NO_SCRIPT),)
        words = [word for flag in flags for word in flag.words]
        message = self._message([*words, script, *arguments], with_script=True)
        return () if message is None else (RefusedFlag(flag=None, why=Refusal.OTHER, message=message),)

    def _refused_flag(self, flag: Flag) -> RefusedFlag | None:
        """Return why one flag is refused by itself."""
        message = self._message(flag.words, with_script=False)
        if message is None:
            return None
        key = self.key(flag.name)
        if message.startswith("ambiguous"):
            why = Refusal.AMBIGUOUS
        elif key is None or message.startswith("unrecognized"):
            why = Refusal.UNKNOWN
        elif is_switch(key):
            why = Refusal.NEEDLESS_VALUE
        else:
            why = Refusal.NO_VALUE if flag.value is None else Refusal.WRONG_VALUE
        return RefusedFlag(flag=flag, why=why, message=message)

    def _message(self, words: Sequence[str], *, with_script: bool) -> str | None:
        """Return argparse's message for words that it refuses; None if it takes them."""
        return self._parsers[with_script].refusal(words)

    @cached_property
    def _parsers(self) -> tuple[LauncherParser, LauncherParser]:
        return _parsers_of(self.keys, abbreviates=self.abbreviates, takes_dashes=self.takes_dashes)


@lru_cache(maxsize=16)  # hundreds of flags take long to add
def _parsers_of(
    keys: tuple[Key, ...], *, abbreviates: bool, takes_dashes: bool
) -> tuple[LauncherParser, LauncherParser]:
    """Return argparse's parsers of the flags alone, and of whole lines."""
    from zerofit.checking.inputs.launcher_parser import LauncherParser  # argparse is needed for lines only

    flags, line = (LauncherParser(prog="", add_help=False, allow_abbrev=abbreviates) for _ in range(2))
    for key in keys:
        options = dict.fromkeys(_spellings(key, takes_dashes=takes_dashes))
        for parser in (flags, line):
            parser.add_flag(
                *options,
                dest=key.name,
                kind=next(map(_TYPES.get, key.kinds), None),
                is_switch=is_switch(key),
            )
    line.add_argument("script")
    line.add_argument("arguments", nargs="...")  # argparse.REMAINDER
    return flags, line


def _spellings(key: Key, *, takes_dashes: bool) -> Sequence[str]:
    """Return a flag's option strings."""
    names = [name for name in (key.name, *key.aliases) if len(name) > 1]
    short = [f"-{name}" for name in key.aliases if len(name) == 1]
    dashed = [f"--{name.replace('_', '-')}" for name in names] if takes_dashes else []
    return [*(f"--{name}" for name in names), *dashed, *short]


def is_switch(key: Key) -> bool:
    """Return True for a flag without a value."""
    return key.kinds == (ValueKind.BOOL,)
