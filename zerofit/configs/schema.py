"""Schemas: the keys that the library reading a file accepts; documents checked against them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zerofit.configs.document import Entries

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.configs.document import Document, KeyValue


class ValueKind(StrEnum):
    """The type of a value in a file."""

    BOOL = "bool"
    INTEGER = "integer"
    NUMBER = "number"
    STRING = "string"
    NULL = "null"
    LIST = "list"
    SECTION = "section"


class OnUnknown(StrEnum):
    """What the library does with a key that its section does not have."""

    IGNORES = "ignores"
    """Ignores it silently."""
    REJECTS = "rejects"
    """Raises an error."""
    ACCEPTS = "accepts"
    """The section takes any key, such as an optimizer's params."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a section; the catalog's files have fields of the same names, in this order."""

    name: str
    kinds: tuple[ValueKind, ...] = ()
    """Types that the library handles correctly; empty: any."""
    converts: bool = False
    """True if the library converts other types: "8" and 8.0 to 8, "yes" and 1 to true."""
    choices: tuple[str | int, ...] = ()
    """The only valid values, if there are few."""
    ignores_case: bool = False
    """True if choices are case-insensitive."""
    pattern: str = ""
    """The regular expression of valid texts, if the reader has a syntax for them."""
    example: str = ""
    """Valid texts, for messages: "8, gpu or auto"."""
    aliases: tuple[str, ...] = ()
    """Other spellings that the library accepts for this key."""
    required: bool = False
    """True if it must be present in its section."""
    reader: str = ""
    """The package that reads the key, if it is not the schema's own."""
    since: str = ""
    """The first release for which this holds; empty: the oldest supported one."""
    until: str = ""
    """The first release for which this no longer holds; empty: it holds for the newest."""
    above: float | None = None
    """Exclusive lower bound of a number."""
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    replaced_by: str | None = None
    """For a deprecated key, the path of its replacement, "" if there is none; None for a key in use."""
    section: Section | None = None
    """The keys of a section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A mapping in the file."""

    keys: tuple[Key, ...]
    on_unknown: OnUnknown
    drops_auto: bool = False
    """True if a key with the value "auto" is treated as missing."""
    params_of: tuple[tuple[str, Section], ...] = ()
    """For a section with a type and params: the valid params of each type."""

    def find(self, name: str) -> Key | None:
        """Return the key of that name or alias."""
        return next((key for key in self.keys if name == key.name or name in key.aliases), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """A key of an earlier version that the library now refuses."""

    path: tuple[str, ...]
    instead: str
    """What to write in its place, or a sentence that says what to do."""

    @property
    def fix(self) -> str:
        """The fix, in words."""
        return self.instead if " " in self.instead else f"write {self.instead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRelease:
    """A key that this release lacks and another supported one has."""

    path: tuple[str, ...]
    since: str
    """The first release with it; empty: the oldest supported one."""
    until: str
    """The first release without it; empty: the newest one has it."""
    instead: str | None = None
    """The equivalent key in this release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """All keys of one kind of file, for one version of the library.

    In the catalog it has the keys of all supported releases, with several entries for one name.
    """

    package: str
    version: str
    """The release; in the catalog, the newest one."""
    root: Section
    removed: tuple[Removed, ...] = ()
    other_releases: tuple[OtherRelease, ...] = ()

    def find(self, *path: str) -> Key | None:
        """Return the key at a path, such as find("zero_optimization", "stage")."""
        section: Section | None = self.root
        key = None
        for name in path:
            key = section.find(name) if section else None
            if key is None:
                return None
            section = key.section
        return key

    def walk(self) -> Iterator[tuple[tuple[str, ...], Key]]:
        """Yield each key with its path."""
        yield from _walk(self.root, ())


def _walk(section: Section, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Key]]:
    for key in section.keys:
        yield (*path, key.name), key
        if key.section is not None:
            yield from _walk(key.section, (*path, key.name))


class Schemas:
    """Every schema that the rules need, each read when it is first used, as most runs need few.

    Args:
        load: returns the schema of a name, which is that of its property.
    """

    def __init__(self, load: Callable[[str], Schema]) -> None:
        self._load = load

    @cached_property
    def deepspeed(self) -> Schema:
        """ds_config.json."""
        return self._load("deepspeed")

    @cached_property
    def accelerate(self) -> Schema:
        """The file of `accelerate config`."""
        return self._load("accelerate")

    @cached_property
    def accelerate_launch(self) -> Schema:
        """Flags of `accelerate launch`: one flat section, names with underscores and without dashes."""
        return self._load("accelerate_launch")

    @cached_property
    def torchrun(self) -> Schema:
        """Flags of torchrun; those that only torch.distributed.launch has name it as their reader."""
        return self._load("torchrun")

    @cached_property
    def deepspeed_launcher(self) -> Schema:
        """Flags of the deepspeed launcher."""
        return self._load("deepspeed_launcher")

    @cached_property
    def zerofit_launch(self) -> Schema:
        """Flags of `zerofit launch`."""
        return self._load("zerofit_launch")

    @cached_property
    def training_arguments(self) -> Schema:
        """Fields of transformers' TrainingArguments, one flat section."""
        return self._load("training_arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundKey:
    """One entry of a document."""

    path: tuple[str, ...]
    entry: KeyValue
    section: Section
    """The section it is in."""
    key: Key | None
    """Its definition in the section; None for an unknown key."""

    @property
    def value(self) -> Any:
        """The value as plain Python object."""
        return self.entry.plain


def walk_document(document: Document, schema: Schema) -> Iterator[FoundKey]:
    """Yield each entry of sections known to the schema; a repeated key is yielded once."""
    yield from _walk_entries(document.root, schema.root, ())


def _walk_entries(entries: Entries, section: Section, path: tuple[str, ...]) -> Iterator[FoundKey]:
    for entry in entries.entries:
        if entries.find(entry.key) is not entry:
            continue
        found = FoundKey(path=(*path, entry.key), entry=entry, section=section, key=section.find(entry.key))
        yield found
        if found.key is None or not isinstance(entry.node, Entries):
            continue
        below = found.key.section
        if section.params_of and entry.key == "params":
            below = params_section(entries, section) or below
        if below is not None:
            yield from _walk_entries(entry.node, below, found.path)


def params_section(entries: Entries, section: Section) -> Section | None:
    """Return the valid params for the type beside them; DeepSpeed's own optimizers ignore case."""
    entry = entries.find("type")
    by_type = dict(section.params_of)
    name = entry.plain if entry else None
    if not isinstance(name, str):
        return None
    return by_type.get(name) or by_type.get(name.lower())


# What pydantic's lax mode, which DeepSpeed uses, converts to a boolean or an integer:
# https://docs.pydantic.dev/latest/concepts/conversion_table/
_BOOL_TEXTS = {"true", "t", "yes", "y", "on", "1", "false", "f", "no", "n", "off", "0"}
_INTEGER_TEXT = re.compile(r"[+-]?[0-9]+(_[0-9]+)*(\.0+)?")

_KIND_NAMES = {
    ValueKind.BOOL: "true or false",
    ValueKind.INTEGER: "a whole number",
    ValueKind.NUMBER: "a number",
    ValueKind.STRING: "a string",
    ValueKind.NULL: "null",
    ValueKind.LIST: "a list",
    ValueKind.SECTION: "a mapping",
}


def expected(key: Key) -> str:
    """Return what a key accepts, in words: "0, 1, 2 or 3", "a whole number greater than 0"."""
    if key.choices:
        return _or([str(choice) for choice in key.choices])
    if key.example:
        return key.example
    limits = (
        ("greater than", key.above),
        ("of at least", key.at_least),
        ("less than", key.below),
        ("of at most", key.at_most),
    )
    bounds = " and ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)
    kinds = _or([_KIND_NAMES[kind] for kind in key.kinds if kind is not ValueKind.NULL])
    return f"{kinds} {bounds}".strip()


def is_right_type(key: Key, value: Any) -> bool:
    """Return True if a value has a type that the library accepts or converts."""
    return not key.kinds or any(_is(kind, value, converts=key.converts) for kind in key.kinds)


def is_in_range(key: Key, value: Any) -> bool:
    """Return True if a value of the right type is one of the choices and within the bounds."""
    if value is None or isinstance(value, (list, dict)):
        return True
    if key.choices:
        return _as_choice(value, ignores_case=key.ignores_case) in {
            _as_choice(choice, ignores_case=key.ignores_case) for choice in key.choices
        }
    if key.pattern and isinstance(value, str):
        return re.fullmatch(key.pattern, value) is not None
    takes_numbers = ValueKind.INTEGER in key.kinds or ValueKind.NUMBER in key.kinds
    number = _number(value) if takes_numbers else None
    if number is None:
        return True
    return (
        (key.above is None or number > key.above)
        and (key.at_least is None or number >= key.at_least)
        and (key.below is None or number < key.below)
        and (key.at_most is None or number <= key.at_most)
    )


def _is(kind: ValueKind, value: Any, *, converts: bool) -> bool:
    match kind:
        case ValueKind.NULL:
            return value is None
        case ValueKind.STRING:
            return isinstance(value, str)
        case ValueKind.LIST:
            return isinstance(value, list)
        case ValueKind.SECTION:
            return isinstance(value, dict)
        case ValueKind.BOOL:
            return isinstance(value, bool) or (converts and _is_bool_like(value))
        case ValueKind.INTEGER:
            return _is_integer(value) or (converts and _is_integer_like(value))
        case ValueKind.NUMBER:
            is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
            return is_plain or (converts and _number(value) is not None)


def _is_integer(value: Any) -> bool:
    # 5e8 and 2.0 are integers in JSON and to the libraries.
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return is_whole and not isinstance(value, bool)


def _is_bool_like(value: Any) -> bool:
    return value in (0, 1) if not isinstance(value, str) else value.lower() in _BOOL_TEXTS


def _is_integer_like(value: Any) -> bool:
    if isinstance(value, str):
        return _INTEGER_TEXT.fullmatch(value.strip()) is not None
    return isinstance(value, bool)


def _number(value: Any) -> float | None:
    if not isinstance(value, (bool, int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None if isinstance(value, str) else math.inf


def _as_choice(value: Any, *, ignores_case: bool) -> str:
    if isinstance(value, (bool, float)):
        value = int(value) if float(value).is_integer() else value
    text = str(value).strip()
    if _INTEGER_TEXT.fullmatch(text):
        return text.partition(".")[0].replace("_", "").removeprefix("+").lstrip("0") or "0"
    return text.lower() if ignores_case else text


def _or(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
