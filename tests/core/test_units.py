"""Sizes: GiB is 2^30, GB is 10^9, and neither is taken for the other."""

from __future__ import annotations

import pytest

from zerofit.core.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_apart,
    format_bytes,
    parse_bytes,
    parse_bytes_per_s,
)


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


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (3 * GIB, 2 * GIB, ("3.0 GiB", "2.0 GiB")),
        (int(16.84 * GIB), int(16.81 * GIB), ("16.84 GiB", "16.81 GiB")),
        (80 * GIB + 1, 80 * GIB, ("80.000000001 GiB", "80.000000000 GiB")),
        (GIB, GIB, ("1.0 GiB", "1.0 GiB")),
        (GIB, GIB - 1, ("1.0 GiB", "1024.0 MiB")),
    ],
)
def test_sizes_that_differ_are_told_apart(one: int, other: int, texts: tuple[str, str]) -> None:
    assert format_apart(one, other) == texts


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512G", 512 * GIB),
        ("512g", 512 * GIB),
        ("512 GiB", 512 * GIB),
        ("512GB", 512 * 10**9),
        (" 1T ", TIB),
        ("1.5T", 1536 * GIB),
        ("7TB", 7 * 10**12),
        ("0.1GB", 10**8),
        ("24564MiB", 24564 * MIB),
        ("2K", 2 * KIB),
        ("0G", 0),
    ],
)
def test_text_to_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "512", "G", "1Q", "-1G", "1Gi", "1,5T", "1e3G", "1GG", "512 Gigs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size with a unit, such as"):
        parse_bytes(text)


@pytest.mark.parametrize("num_bytes", [KIB, 3 * MIB, 80 * GIB, 7 * TIB])
def test_a_printed_size_reads_as_itself(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("400Gb/s", 50e9),
        ("400Gbit/s", 50e9),
        ("100Gbps", 12.5e9),
        ("100gbps", 12.5e9),
        ("50GB/s", 50e9),
        ("50 GBps", 50e9),
        ("1.6Tb/s", 200e9),
        ("900Mbytes/s", 900e6),
    ],
)
def test_text_to_rate(text: str, bytes_per_s: float) -> None:
    assert parse_bytes_per_s(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "400", "400G", "400G/s", "400GB", "fast"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate with a unit, such as"):
        parse_bytes_per_s(text)


@pytest.mark.parametrize("text", ["1025P", "999999999T"])
def test_a_size_beyond_64_bits_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is more than any machine has"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["999999999TB/s", "99999999999Tb/s"])
def test_a_rate_of_no_machine_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is more than any machine has"):
        parse_bytes_per_s(text)


def test_endless_digits_are_no_number() -> None:
    for parse, text in ((parse_bytes, "9" * 5000 + "G"), (parse_bytes_per_s, "9" * 5000 + "GB/s")):
        with pytest.raises(ValueError, match="with a unit"):
            parse(text)
