"""Sizes: GiB is 2^30, GB is 10^9, and neither is taken for the other."""

from __future__ import annotations

import pytest

from zerofit.units import GIB, KIB, MIB, TIB, format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("80G", 80 * 2**30),
        ("80g", 80 * 2**30),
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("80 gb", 80 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        ("1.5TB", 1_500_000_000_000),
        ("  512 M  ", 512 * 2**20),
        ("512MB", 512_000_000),
        ("2K", 2048),
        ("2KB", 2000),
        ("0.1KB", 100),
    ],
)
def test_size_to_bytes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert isinstance(parse_size(text), int)


@pytest.mark.parametrize("text", ["", "G", "80X", "80GBB", "-1G", "1e9", "1,5G", "80 G iB", "1.G", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as error:
        parse_size(text)
    assert str(error.value) == f"{text!r} is not a size; write a number and a unit, such as 80G or 1.5TiB"


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


@pytest.mark.parametrize("num_bytes", [1, 700, 3 * KIB, 5 * MIB, 80 * GIB, 7 * TIB])
def test_text_of_a_round_size_reads_back(num_bytes: int) -> None:
    assert parse_size(format_bytes(num_bytes)) == num_bytes
