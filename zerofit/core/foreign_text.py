"""Text that others wrote, such as logs, records and names of files, made safe to print."""

from __future__ import annotations

import json
import re

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]{0,64}+[ -/]{0,16}+[@-~]?"
    r"|[\]PX^_][^\x07\x1b\x9c\n]{0,4096}+(?:\x07|\x1b\\|\x9c)"
    r"|[ -/]{0,4}+[0-~])"
)
"""Control sequences (colours, movements), strings to the terminal (a title, a link, the clipboard), and other
escapes: ECMA-48."""
_SHORT_ESCAPES = re.compile(
    r"\x9b[0-?]{0,64}+[ -/]{0,16}+[@-~]?"
    r"|[\x90\x98\x9d-\x9f][^\x07\x1b\x90\x98\x9c-\x9f\n]{0,4096}+(?:\x07|\x1b\\|\x9c)"
)
"""The same begun by a single character, of C1."""
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    r"\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]|\r(?!\n)"
)
"""Control characters but tab and the ends of lines, characters that turn or hide text, and surrogates, which
can't be printed."""


def without_escapes(text: str) -> str:
    """Return a text without a terminal's escape sequences, as programs write them today."""
    return _ESCAPES.sub("", text) if "\x1b" in text else text


def printable(text: str) -> str:
    """Return a text that a terminal shows as it reads: no escapes, other control characters written out."""
    return _CONTROLS.sub(_written_out, _SHORT_ESCAPES.sub("", without_escapes(text)))


def _written_out(found: re.Match[str]) -> str:
    """Return a control character as JSON writes it: \\u0008 for a backspace, \\u202e for right-to-left."""
    return json.dumps(found[0])[1:-1] if found[0] > "\x1f" else f"\\u{ord(found[0]):04x}"
