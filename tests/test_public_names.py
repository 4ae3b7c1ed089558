"""The package's public names: each that is listed is there."""

from __future__ import annotations

import zerofit


def test_listed_names_are_there() -> None:
    assert [getattr(zerofit, name).__name__ for name in zerofit.__all__] == list(zerofit.__all__)
