"""The keys of a schema in one release of its library."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.configs.schema import Key, OtherRelease, Schema, Section
from zerofit.core.supported import release_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def schema_at(history: Schema, version: str | None) -> Schema:
    """Return the schema of one release.

    Args:
        history: the keys of all releases, each with those for which it holds.
        version: the release; None or a newer one than all known ones means the newest known.
    """
    newest = release_of(history.version)
    release = newest if version is None else min(release_of(version), newest)
    root = _section_at(history.root, release)
    others = tuple(_others(history.root, root, ()))
    to_come = {other.path for other in others if other.since and release < release_of(other.since)}
    is_newest = release == newest
    now = replace(history, root=root, version=history.version if is_newest or not version else version)
    removed = tuple(
        gone for gone in history.removed if gone.path not in to_come and now.find(*gone.path) is None
    )
    return replace(now, removed=removed, other_releases=others)


def _section_at(section: Section, release: tuple[int, ...]) -> Section:
    keys = tuple(_key_at(key, release) for key in section.keys if _holds(key, release))
    params_of = tuple((name, _section_at(params, release)) for name, params in section.params_of)
    # Most sections are equal in all releases; rebuilding them would take longer than reading them.
    is_same = len(keys) == len(section.keys) and all(map(operator.is_, keys, section.keys))
    if is_same and all(now is then for (_, now), (_, then) in zip(params_of, section.params_of, strict=True)):
        return section
    return replace(section, keys=keys, params_of=params_of)


def _key_at(key: Key, release: tuple[int, ...]) -> Key:
    below = _section_at(key.section, release) if key.section else None
    if not (key.since or key.until) and below is key.section:
        return key
    return replace(key, since="", until="", section=below)


def _holds(key: Key, release: tuple[int, ...]) -> bool:
    if key.since and release < release_of(key.since):
        return False
    return not key.until or release < release_of(key.until)


def _others(history: Section, now: Section, path: tuple[str, ...]) -> Iterator[OtherRelease]:
    """Yield the keys that only other releases have; for a whole section only itself."""
    keys = {key.name: key for key in now.keys}
    for key in history.keys:
        here = keys.get(key.name)
        if here is None:
            twins = (other.name for other in history.keys if other.replaced_by == key.name)
            instead = next((name for name in twins if name in keys), None)
            yield OtherRelease(path=(*path, key.name), since=key.since, until=key.until, instead=instead)
        elif key.section is not None and here.section is not None:
            yield from _others(key.section, here.section, (*path, key.name))


def fix_for_release(schema: Schema, *path: str) -> str | None:
    """Return the fix for a key that the schema lacks; None if no supported release has it.

    Args:
        schema: the keys of the installed release.
        path: of the key.
    """
    other = next((other for other in schema.other_releases if other.path == path), None)
    if other is None:
        return None
    package = schema.package
    if other.since and release_of(schema.version) < release_of(other.since):
        when = f"{package} has {path[-1]} since {other.since}"
        below = f", before {other.until}" if other.until else ""
        otherwise = f"leave it out, or install {package} {other.since} or later{below}"
    else:
        when = f"{package} {other.until} dropped {path[-1]}"
        otherwise = f"leave it out: {when}"
    return f"write {other.instead}: {when}" if other.instead else otherwise
