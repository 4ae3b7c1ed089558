"""A schema over the releases of its library: what it is in one of them, and how the next one is added."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.configs.schema import Key, OtherRelease, Schema, Section
from zerofit.core.supported import release_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def schema_at(history: Schema, version: str | None) -> Schema:
    """Return the keys that one release has.

    Args:
        history: the keys of all releases, each with those for which it holds.
        version: the release; None, and one newer than all that were looked at, stand for the newest of those.
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
    # Most sections are the same in all releases, and to make them anew would take longer than to read them.
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
    """Yield the keys that only other releases have; of a section that they alone have, not those below."""
    keys = {key.name: key for key in now.keys}
    for key in history.keys:
        here = keys.get(key.name)
        if here is None:
            twins = (other.name for other in history.keys if other.replaced_by == key.name)
            instead = next((name for name in twins if name in keys), None)
            yield OtherRelease(path=(*path, key.name), since=key.since, until=key.until, instead=instead)
        elif key.section is not None and here.section is not None:
            yield from _others(key.section, here.section, (*path, key.name))


def with_release(history: Schema, newer: Schema) -> Schema:
    """Return the keys of all releases, one more among them.

    Args:
        history: the keys of the releases before.
        newer: the keys of the next release, or of the newest one again, which then replace what was known.

    Raises:
        ValueError: the history knows a newer release already.
    """
    if release_of(newer.version) < release_of(history.version):
        raise ValueError(f"{newer.package} {newer.version} comes before {history.version}, which is known")
    is_again = release_of(newer.version) == release_of(history.version)
    return replace(newer, root=_follow(history.root, newer.root, newer.version, is_again=is_again))


def _follow(old: Section, new: Section, version: str, *, is_again: bool) -> Section:
    open_keys = {key.name: key for key in old.keys if not key.until}
    closed = [key for key in old.keys if key.until]
    keys: list[Key] = []
    for key in new.keys:
        was = open_keys.pop(key.name, None)
        keys += (former for former in closed if former.name == key.name)
        if was is None:
            keys.append(replace(key, since=version))
        elif is_again or _is_same(was, key):
            keys.append(replace(key, since=was.since, section=_below(was, key, version, is_again=is_again)))
        else:
            keys += (replace(was, until=version), replace(key, since=version))
    names = {key.name for key in new.keys}
    gone = [] if is_again else [replace(key, until=version) for key in open_keys.values()]
    before = dict(old.params_of)
    return replace(
        new,
        keys=(*keys, *(key for key in closed if key.name not in names), *gone),
        params_of=tuple(
            (name, _follow(before[name], params, version, is_again=is_again) if name in before else params)
            for name, params in new.params_of
        ),
    )


def _below(was: Key, key: Key, version: str, *, is_again: bool) -> Section | None:
    if was.section is None or key.section is None:
        return key.section
    return _follow(was.section, key.section, version, is_again=is_again)


def _is_same(was: Key, key: Key) -> bool:
    """Return whether a key is what it was, whatever came to the keys below it or went."""
    sections = [
        section and (section.on_unknown, section.drops_auto) for section in (was.section, key.section)
    ]
    return replace(was, since="", section=None) == replace(key, section=None) and sections[0] == sections[1]


def fix_for_release(schema: Schema, *path: str) -> str | None:
    """Return the fix for a key that the schema lacks; None where no supported release is known to have it.

    Args:
        schema: the keys of the release that will run.
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
