"""What the user may have meant by a key that its section does not have."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.configs.schema import Schema, Section
    from zerofit.configs.schemas.walk import Found

_NEAR = 0.8
"""ASSUMPTION: from this likeness on, a key is another one misspelt; "optimizer" and "optimiser" have 0.89."""
_SAME = 0.9
"""ASSUMPTION: from this likeness on, and with one key alone, nothing else can be meant."""
_ONE_PLACE = ("stage", "zenflow", "hysteresis")
"""Keys without an underscore that one section has and whose name means nothing else."""
_OTHER_NAMES = {"learning_rate": "lr", "epsilon": "eps"}
"""What other libraries call a key of DeepSpeed's, too far from it to be a misspelling."""
_TELLING = ("zero_optimization", "fp16", "activation_checkpointing", "aio", "optimizer", "scheduler")
"""Sections whose keys with an underscore mean nothing else; "seed" or "debug" may be anybody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """Valid keys near to an unknown one."""

    spellings: tuple[str, ...] = ()
    """Keys of the same section, the nearest first."""
    is_sure: bool = False
    """Whether it can only be the first spelling."""
    elsewhere: tuple[tuple[str, ...], ...] = ()
    """Paths of keys with that very name in other sections."""

    of_release: str | None = None
    """What to do where another release has the very key, in words."""

    @property
    def fix(self) -> str | None:
        """What to do, in words; None where nothing is near."""
        if self.of_release is not None:
            return self.of_release
        if self.elsewhere:
            sections = [".".join(path[:-1]) for path in self.elsewhere]
            places = " or ".join(f"into {section}" if section else "to the top level" for section in sections)
            return f"move it {places}, or remove it"
        return f"write {' or '.join(self.spellings)}" if self.spellings else None


def meant_by(found: Found, schema: Schema) -> Meant:
    """Return what an unknown key may have been meant to be."""
    name = found.path[-1]
    other = _OTHER_NAMES.get(name)
    if other is not None and found.section.find(other) is not None:
        return Meant(spellings=(other,), is_sure=True)
    if places := _places(name, schema):
        return Meant(elsewhere=places)
    likeness = sorted(
        ((_likeness(name, spelling), spelling) for spelling in set(_spellings(found.section))),
        key=lambda pair: (-pair[0], pair[1]),
    )
    near = [(likeness, spelling) for likeness, spelling in likeness if likeness >= _NEAR][:3]
    best = near[0][0] if near else 0.0
    # A plural or a prefix makes two keys alike that both exist; then the far one is not worth a word.
    near = [(likeness, spelling) for likeness, spelling in near if likeness >= best - 0.05]
    return Meant(spellings=tuple(spelling for _, spelling in near), is_sure=len(near) == 1 and best >= _SAME)


def _spellings(section: Section) -> Iterator[str]:
    """Yield the names that one should write; of an alias, the documented one only."""
    for key in section.keys:
        if key.replaced_by is None:
            yield key.name


def _likeness(one: str, other: str) -> float:
    matcher = SequenceMatcher(a=_plain(one), b=_plain(other), autojunk=False)
    # The quick ones are upper bounds; a file of thousands of unknown keys would take minutes without them.
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio)
    return matcher.ratio() if all(bound() >= _NEAR for bound in bounds) else 0.0


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


def _places(name: str, schema: Schema) -> tuple[tuple[str, ...], ...]:
    """Return where a key of that very name belongs, if its name tells that."""
    if "_" not in name and name not in (*_TELLING, *_ONE_PLACE):
        return ()
    return tuple(
        path
        for path, key in schema.walk()
        if (name == key.name or name in key.aliases) and (len(path) == 1 or path[0] in _TELLING)
    )
