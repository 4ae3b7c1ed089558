"""A schema over several releases: each key holds from its first to before the first without it."""

from __future__ import annotations

import pytest

from tools.schemas.new_release import with_release
from zerofit.configs.schema import Key, OnUnknown, OtherRelease, Removed, Schema, Section, ValueKind
from zerofit.configs.schemas.releases import schema_at


def _schema(version: str, *keys: Key) -> Schema:
    gone = Removed(path=("old",), instead="use new")
    removed = () if any(key.name == "old" for key in keys) else (gone,)
    return Schema(
        package="lib", version=version, root=Section(keys=keys, on_unknown=OnUnknown.REJECTS), removed=removed
    )


def _tree(*keys: Key) -> Key:
    return Key(name="tree", section=Section(keys=keys, on_unknown=OnUnknown.IGNORES))


_STABLE, _DEEP, _DEEPER = Key(name="stable"), Key(name="deep"), Key(name="deeper")
_RELEASES = [
    _schema("1.0", _STABLE, Key(name="old"), Key(name="mode", choices=("a",)), _tree(_DEEP)),
    _schema("1.2", _STABLE, Key(name="old"), Key(name="mode", choices=("a", "b")), _tree(_DEEPER, _DEEP)),
    _schema(
        "1.10",
        _STABLE,
        Key(name="new", kinds=(ValueKind.BOOL,)),
        Key(name="mode", choices=("a", "b"), replaced_by="new"),
        _tree(_DEEPER),
    ),
]


def _history() -> Schema:
    history = _RELEASES[0]
    for schema in _RELEASES[1:]:
        history = with_release(history, schema)
    return history


@pytest.mark.parametrize(
    ("version", "index"),
    [("0.9", 0), ("1.0", 0), ("1.1.7", 0), ("1.2", 1), ("1.9", 1), ("1.10", 2), ("3", 2), (None, 2)],
)
def test_a_release_has_the_keys_that_it_was_seen_to_have(version: str | None, index: int) -> None:
    found, seen = schema_at(_history(), version), _RELEASES[index]
    assert sorted(found.root.keys, key=lambda key: key.name) == sorted(
        seen.root.keys, key=lambda key: key.name
    )
    assert found.removed == seen.removed


def test_the_history_says_since_and_until_when_a_key_holds() -> None:
    keys = _history().root.keys
    assert [(key.name, key.since, key.until) for key in keys] == [
        ("stable", "", ""),
        ("new", "1.10", ""),
        ("mode", "", "1.2"),
        ("mode", "1.2", "1.10"),
        ("mode", "1.10", ""),
        ("tree", "", ""),
        ("old", "", "1.10"),
    ]
    tree = keys[-2].section
    assert tree is not None
    assert [(key.name, key.since, key.until) for key in tree.keys] == [
        ("deeper", "1.2", ""),
        ("deep", "", "1.10"),
    ]


def test_keys_of_other_releases_are_known_with_the_key_that_means_the_same() -> None:
    assert schema_at(_history(), "1.0").other_releases == (
        OtherRelease(path=("new",), since="1.10", until="", instead="mode"),
        OtherRelease(path=("tree", "deeper"), since="1.2", until=""),
    )
    assert schema_at(_history(), None).other_releases == (
        OtherRelease(path=("tree", "deep"), since="", until="1.10"),
        OtherRelease(path=("old",), since="", until="1.10"),
    )


def test_the_newest_release_read_again_takes_its_own_place() -> None:
    again = _schema("1.10", _STABLE, Key(name="mode", choices=("c",)), _tree(_DEEPER))
    assert schema_at(with_release(_history(), again), None).root == again.root
    assert schema_at(with_release(_history(), again), "1.2").root.find("mode") == Key(
        name="mode", choices=("a", "b")
    )
    assert with_release(_history(), _RELEASES[-1]) == _history()


def test_an_older_release_is_not_put_behind_a_newer_one() -> None:
    with pytest.raises(ValueError, match=r"lib 1\.2 comes before 1\.10, which is known"):
        with_release(_history(), _RELEASES[1])
