"""Sizes: GiB is 2^30, GB is 10^9, and neither is taken for the other."""

from __future__ import annotations

import pytest

from zerofit.units import GIB, KIB, MIB, TIB, format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB - 1, "1024.0 KiB"),
        (MIB, "1.0 MiB"),
        (10**9, "953.7 MiB"),
        (GIB, "1.0 GiB"),
        (85_899_345_920, "80.0 GiB"),
        (80 * 10**9, "74.5 GiB"),
        (TIB, "1.0 TiB"),
        (5000 * TIB, "5000.0 TiB"),
        (-2 * GIB, "-2.0 GiB"),
    ],
)
def test_bytes_to_text(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
