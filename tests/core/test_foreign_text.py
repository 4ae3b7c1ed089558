"""Text of others as a terminal gets it: no escapes, and no characters that hide or turn what it says."""

from __future__ import annotations

import unicodedata

import pytest

from zerofit.cli.output.console import for_terminal
from zerofit.core.foreign_text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("\x1b[2J\x1b[1;1Hroot# ", "root# "),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;ZXZpbA==\x07x", "x"),
        ("\x1bP1;2q\x1b\\x", "x"),
        ("\x1bc\x1b(Bx", "x"),
        ("\x9b31mx\x9d0;t\x9cy", "xy"),
        ("ab\x08\x08cd", "ab\\u0008\\u0008cd"),
        ("user\rroot", "user\\u000droot"),
        ("a\r\nb", "a\r\nb"),
        ("bell\x07 null\x00", "bell\\u0007 null\\u0000"),
        ("file\u202egpj.exe", "file\\u202egpj.exe"),
        ("a\u2066b\u2069 c\u200fd", "a\\u2066b\\u2069 c\\u200fd"),
        ("one\u2028two\x85three", "one\\u2028two\\u0085three"),
        ("\U000e0041hidden", "\\udb40\\udc41hidden"),
        ("name\udcff.log", "name\\udcff.log"),
        ("x\x1b", "x\\u001b"),
        ("tab\tand\nline", "tab\tand\nline"),
        ("日本 ±8 % é 👩\u200d👩", "日本 ±8 % é 👩\u200d👩"),
    ],
)
def test_what_a_terminal_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_no_control_character_is_left_of_any() -> None:
    every = "".join(f"{chr(code)}a" for code in range(0x11000) if chr(code) not in "\t\n")
    left = {character for character in printable(every) if unicodedata.category(character) in ("Cc", "Cs")}
    assert left == set()


@pytest.mark.parametrize(
    "text", ["error[a]: b\x1b]0;x\x07\n  found: \x9b2Jc", "cause:  x\x08\u202e  [disk-full, confidence high]"]
)
def test_a_quoted_text_has_only_our_own_colours(text: str) -> None:
    shown = for_terminal(text)
    assert "\x1b[" in shown
    assert not set(shown.replace("\x1b[", "")) & set("\x1b\x07\x08\x9b\u202e")
