"""The figures of how README and the pages read."""

from __future__ import annotations

import re

import pytest
from commands import ROOT

from tools.readability import documents, readability, sentences, syllables


def test_code_is_a_word_and_blocks_tables_and_pictures_are_none() -> None:
    text = (
        "# Head\n\nRun `zerofit plan --gpus A`. See [the page](a.md): it helps.\n\n"
        "- One more. Two\n  more.\n\n"
        "| a | table |\n\n```sh\nnot read\n```\n\n![a picture](b.png)\n"
    )
    assert [part.split() for part in sentences(text)] == [
        ["Run", "code."],
        ["See", "[the", "page:"],
        ["it", "helps."],
        ["One", "more."],
        ["Two", "more."],
    ]
    found = readability(text)
    assert (found.num_words, found.num_sentences, found.longest) == (11, 5, 3)


@pytest.mark.parametrize(
    ("word", "count"), [("code", 1), ("table", 2), ("memory", 3), ("GPU", 1), ("optimizer", 4), ("the", 1)]
)
def test_syllables(word: str, count: int) -> None:
    assert syllables(word) == count


def test_short_words_in_short_sentences_read_easily() -> None:
    easy, hard = "It fits. It runs.", "Heterogeneous parallelization necessitates considerable configuration."
    assert readability(easy).reading_ease > 100
    assert readability(hard).reading_ease < 0


def test_readme_and_pages_are_plain_english() -> None:
    found = readability("\n\n".join(path.read_text("utf-8") for path in documents(ROOT)))
    assert found.reading_ease > 70
    assert found.words_per_sentence < 12


def test_a_page_has_600_words_of_text_on_average() -> None:
    navigation = (
        (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2].partition("\n  - Project:")[0]
    )
    names = [name for name in re.findall(r"[\w/-]+\.md", navigation) if "/" not in name]
    words = [readability((ROOT / "docs" / name).read_text("utf-8")).num_words for name in names]
    assert len(words) == 26
    assert sum(words) / len(words) < 600
