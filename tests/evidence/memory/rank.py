"""One rank: measures the cases that it is given by their keys."""

from __future__ import annotations

from typing import Any

from measuring_ranks import serve

from memory.cases import CASES
from memory.collectives import use_copies

_BY_KEY = {case.key: case for case in CASES}


def _measure(named: dict[str, Any]) -> dict[str, Any]:
    from memory.train import measure

    return measure(_BY_KEY[named["key"]])


if __name__ == "__main__":
    use_copies()
    serve(_measure)
