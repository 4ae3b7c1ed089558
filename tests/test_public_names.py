"""The package's public names: each that is listed is there."""

from __future__ import annotations

import pytest

import zerofit


@pytest.mark.parametrize("name", zerofit.__all__)
def test_a_listed_name_is_there(name: str) -> None:
    assert getattr(zerofit, name).__name__ == name
