"""A schema's history with the keys of one more release."""

from __future__ import annotations

from dataclasses import replace

from zerofit.configs.schema import Key, Schema, Section
from zerofit.core.supported import release_of


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
    """Return True if a key is what it was, whatever came to the keys below it or went."""
    sections = [
        section and (section.on_unknown, section.drops_auto) for section in (was.section, key.section)
    ]
    return replace(was, since="", section=None) == replace(key, section=None) and sections[0] == sections[1]
