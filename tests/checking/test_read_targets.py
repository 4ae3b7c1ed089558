"""Targets from files: a script's bytes in the encoding that it declares."""

from __future__ import annotations

import pytest

from zerofit.checking.script_files import decode_script
from zerofit.core.errors import Unreadable


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"x = 1\n", "x = 1\n"),
        (b"\xef\xbb\xbfx = 1\n", "x = 1\n"),
        (b"# -*- coding: latin-1 -*-\nx = '\xe4'\n", "# -*- coding: latin-1 -*-\nx = 'ä'\n"),
        (b"#!python\n# vim: fileencoding=cp1252 :\n\x80", "#!python\n# vim: fileencoding=cp1252 :\n€"),
    ],
)
def test_encodings(data: bytes, text: str) -> None:
    assert decode_script(data) == text


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"x = 1\ny = '\xff'\n", "'utf-8' codec can't decode byte 0xff in position 11: invalid start byte"),
        (b"# coding: klingon\n", "unknown encoding: klingon"),
        (
            b"# coding: hex\nxx\n",
            "'hex' is not a text encoding",
        ),
    ],
)
def test_bytes_that_are_no_text(data: bytes, why: str) -> None:
    with pytest.raises(Unreadable) as caught:
        decode_script(data)
    assert caught.value.problem == "the file is not text in its declared encoding"
    assert caught.value.why.startswith(f"Python can't read it: {why}")
