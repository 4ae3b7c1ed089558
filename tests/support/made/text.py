"""Made text: sentences of a small language, the same for the same seed."""

from __future__ import annotations

import random

_BEGINNINGS = ("ba", "ko", "li", "mu", "ne", "ra", "so", "ti", "va", "zu")
_ENDINGS = ("dan", "gor", "len", "mis", "nut", "pas", "rek", "tol", "van", "wix")
WORDS = tuple(beginning + ending for beginning in _BEGINNINGS for ending in _ENDINGS)
"""All words there are."""


def sentence(chance: random.Random, *, least: int = 4, most: int = 24) -> str:
    """Return words and a full stop."""
    words = chance.choices(WORDS, k=chance.randint(least, most))
    return f"{words[0].capitalize()} {' '.join(words[1:])}."


def sentences(number: int, *, seed: int) -> list[str]:
    """Return that many sentences."""
    chance = random.Random(seed)
    return [sentence(chance) for _ in range(number)]
