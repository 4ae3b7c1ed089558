"""python -m tools.readability [DIR]: words, words a sentence and Flesch's reading ease of README and docs/.

Blocks, tables, pictures, headings and comments are left out. DIR is another checkout.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

_NO_PROSE = re.compile(r"(?s:```.*?(```|\Z))|!\[.*?\]\(.*?\)|^[#|].*$|<!--.*?-->", re.MULTILINE)
_END = re.compile(r"(?<=[.?!:;])\s+|\n\n|^(?:[-*]|\d+\.) ", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_VOWELS = re.compile(r"[aeiouy]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Readability:
    """What a text counts."""

    num_words: int
    num_sentences: int
    num_syllables: int
    longest: int
    """Words of the longest sentence."""

    @property
    def words_per_sentence(self) -> float:
        """The mean."""
        return self.num_words / max(1, self.num_sentences)

    @property
    def reading_ease(self) -> float:
        """Flesch's reading ease: 60 to 70 is plain English (https://doi.org/10.1037/h0057532)."""
        syllables = self.num_syllables / max(1, self.num_words)
        return 206.835 - 1.015 * self.words_per_sentence - 84.6 * syllables


def sentences(text: str) -> list[str]:
    """Return the sentences of a document; code counts as one word."""
    prose = re.sub(r"\]\(.*?\)", "", _NO_PROSE.sub("\n\n", text))
    parts = _END.split(_CODE.sub("code", prose))
    return [part for part in parts if re.search(r"[A-Za-z]{2}", part)]


def syllables(word: str) -> int:
    """Return the syllables of a word, by its groups of vowels."""
    letters = re.sub(r"[^a-z]", "", word.lower())
    groups = len(_VOWELS.findall(letters))
    return max(1, groups - (letters.endswith("e") and not letters.endswith("le") and groups > 1))


def readability(text: str) -> Readability:
    """Return how a document reads."""
    words = [[word for word in part.split() if re.search(r"\w", word)] for part in sentences(text)]
    return Readability(
        num_words=sum(map(len, words)),
        num_sentences=len(words),
        num_syllables=sum(syllables(word) for part in words for word in part),
        longest=max(map(len, words), default=0),
    )


def documents(root: Path) -> list[Path]:
    """Return README and the written pages of docs/."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def _line(name: str, found: Readability) -> str:
    mean, ease = found.words_per_sentence, found.reading_ease
    return f"{name:28}{found.num_words:6}{mean:8.1f}{found.longest:6}{ease:8.1f}"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
    print(f"{'page':28}{'words':>6}{'/ sent.':>8}{'most':>6}{'Flesch':>8}")
    texts = {path.name: path.read_text("utf-8") for path in documents(folder)}
    for name, text in texts.items():
        print(_line(name, readability(text)))
    print(_line("all", readability("\n\n".join(texts.values()))))
