"""explain on public failure logs: the decisive lines of a corpus, and the figures of its second part."""

from __future__ import annotations

import hashlib
import io
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from runs import ROOT

from zerofit.launching.explain import explain_bytes
from zerofit.launching.failures import failures

_SEED = "zerofit-corpus-1"
_SHARE_OF_FIRST = 0.6
_UNKNOWN = "unknown-exception"
_CORPUS: Mapping[str, Mapping[str, Mapping[str, str]]] = tomllib.loads(
    Path(__file__).with_name("explain_corpus.toml").read_text(encoding="utf-8")
)


def _cause(line: str) -> str:
    """Return the registry's failure that explain names; empty where it names none of them."""
    cause = explain_bytes(io.BytesIO(line.encode()), "log").cause
    return "" if cause is None or cause.failure.id == _UNKNOWN else cause.failure.id


def _expected(entry: Mapping[str, str]) -> str:
    return "" if entry["label"].startswith("none-of-these: ") else entry["label"]


@pytest.mark.parametrize("part", _CORPUS)
def test_decisive_lines_are_explained(part: str) -> None:
    named = {source: _cause(entry["line"]) for source, entry in _CORPUS[part].items()}
    assert named == {source: entry.get("said", _expected(entry)) for source, entry in _CORPUS[part].items()}


def test_corpus_holds_short_lines_and_known_labels_in_the_parts_that_the_seed_draws() -> None:
    for part, entries in _CORPUS.items():
        for source, entry in entries.items():
            assert len(entry["line"]) <= 100, source
            assert _expected(entry) in {"", *failures()}, source
            assert entry.get("said") != _expected(entry), source
            digest = hashlib.sha256(f"{_SEED}:{source.removesuffix('/2')}".encode()).hexdigest()
            drawn = "first" if int(digest[:8], 16) / 2**32 < _SHARE_OF_FIRST else "second"
            assert part == drawn, source
    assert sum(map(len, _CORPUS.values())) >= 200


def test_figures_of_the_document_are_those_of_the_second_part() -> None:
    second = _CORPUS["second"].values()
    known = sum(bool(_expected(entry)) for entry in second)
    precision, recall = [], []
    for look in ("before", "looked"):
        named = sum(bool(entry.get(look, _expected(entry))) for entry in second)
        right = sum(bool(_expected(entry)) and look not in entry for entry in second)
        precision.append(f"{100 * right / named:.1f} % ({right} of {named})")
        recall.append(f"{100 * right / known:.1f} % ({right} of {known})")
    document = (Path(ROOT) / "docs" / "explain-accuracy.md").read_text(encoding="utf-8")
    assert f"named | {' | '.join(precision)} |" in document
    assert f"have one | {' | '.join(recall)} |" in document
    assert f"corpus of {sum(map(len, _CORPUS.values()))} logs" in document
