"""Reads logs of any size and encoding by line: without colours, with rank and time of each line."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from zerofit.core.foreign_text import without_escapes
from zerofit.core.secrets import masked_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BLOCK_BYTES = 1 << 18
_LONGEST_LINE = 1 << 16
"""Characters of a line that are read: a binary file may be one line. ASSUMPTION."""
LONGEST_SHOWN = 240
_SENTENCE_ENDS = re.compile(r"[.;:!?] ")
_LINE_ENDS = re.compile(r"(\r\n|\n|\r)")
_QUOTED = re.compile(r">|std(?:err|out): |E {3}(?=\s*(?:File \"|[\w.]+(?:Error|Exception)\b))")
"""A quoted line in an issue or mail; lines of accelerate test, and pytest's of an exception."""
_RANK = re.compile(
    r"\s*(?:(?:[^\"'`]{0,100}?(?=\[rank\d{1,5}\]:))?"
    r"\[(?:rank|default)?(\d{1,5})\]:|\[\d{1,6},(\d{1,6})\]<std(?:err|out)>:|(?:rank ?)?(\d{1,5}): "
    r"|(?:localhost|(?:\d{1,3}\.){3}\d{1,3}|[a-z][a-z.-]{0,252}\d[a-z0-9.-]{0,252}): "
    r"|\([\w.:]+ pid=\d+(?:, ip=[\w.:]+)?\) ?)"
)
"""`[rank3]:` of torch, `[default3]:` of torchrun --tee, `[1,3]<stderr>:` of mpirun, `3: ` of srun --label;
pdsh names a node and Ray an actor, which are no ranks. A program that logs its children's output
writes a time, a level or a name in front of it. A host name has at most 253 characters."""
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_CLOCK = r"(\d{1,2}):(\d{2}):(\d{2})(?:[.,](\d{1,9}))?"
_TIME = re.compile(
    rf"(?P<iso>\d{{4}}-(?P<m1>\d{{2}})-(?P<d1>\d{{2}})[T _](?P<c1>{_CLOCK}))"
    rf"|(?P<us>(?P<m2>\d{{2}})/(?P<d2>\d{{2}})/\d{{4}} (?P<c2>{_CLOCK}))"
    rf"|(?P<glog>\b[IWEF](?P<m3>\d{{1,2}})(?P<d3>\d{{2}}) (?P<c3>{_CLOCK}))"
    rf"|(?P<sys>\b(?P<m4>{'|'.join(_MONTHS)}) +(?P<d4>\d{{1,2}}) (?P<c4>{_CLOCK}))"
)
_FRONT = re.compile(  # glog's time of a message at INFO or WARNING stays, as its letter is the level
    rf"^(?!\W*[IW]\d)(?:[\[(]?(?:{_TIME.pattern})Z?(?:[+-]\d{{2}}:?\d{{2}})?[\])]?\s*"
    r"(?:stderr F |stdout F )?)"
)
Moment = tuple[int, int, int, int, int, int]
"""Month, day, hour, minute, second, microsecond: not all logs contain the year."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of a log."""

    number: int
    """From 1; a progress bar's updates count as one line."""
    text: str
    """Without colours."""

    @property
    def rank(self) -> int | None:
        """The rank in its prefixes; None without one."""
        return self.rank_and_text[0]

    @property
    def said(self) -> str:
        """The text without leading rank, time and quotation marks."""
        return self.rank_and_text[1]

    @property
    def rank_and_text(self) -> tuple[int | None, str]:
        """The rank and the text, for callers that need both: the prefixes are read once."""
        # The last is the rank: srun and pdsh put a task or a node in front of torchrun's. After one a bare
        # number is text: "404: not found".
        rank, text = None, self.text
        while (found := _QUOTED.match(text) or _RANK.match(text) or _FRONT.match(text)) and found.end():
            if found.re is _RANK:
                if found[3] and rank is not None:
                    break
                rank = next((int(group) for group in found.groups() if group), rank)
            text = text[found.end() :].removeprefix(" ")
        return rank, text.rstrip()

    @property
    def moment(self) -> Moment | None:
        """The time in the line; None without one."""
        return moment_of(self.text)


def moment_of(text: str) -> Moment | None:
    """Return the first time in a text, in the formats of Python, Slurm, glog or syslog."""
    found = _TIME.search(text[:400])
    if found is None:
        return None
    kind = next(number for number in "1234" if found[f"d{number}"])
    month, clock = found[f"m{kind}"], re.split("[:.,]", found[f"c{kind}"])
    fraction = int((clock[3] if len(clock) > 3 else "0").ljust(6, "0")[:6])
    return (
        _MONTHS.index(month) + 1 if month in _MONTHS else int(month),
        int(found[f"d{kind}"]),
        *(int(part) for part in clock[:3]),
        fraction,
    )  # type: ignore[return-value]  # mypy counts no unpacked values


def read_lines(file: IO[bytes], *, is_quiet: Callable[[str], bool]) -> Iterator[LogLine]:
    """Yield the lines of a log of any encoding and size, in bounded memory.

    Args:
        is_quiet: returns True for a part of the log that shows nothing; only its last line is yielded.
    """
    block = file.read(_BLOCK_BYTES)
    decoder = codecs.getincrementaldecoder(_encoding(block))(errors="replace")
    number, rest = 1, ""
    while block or rest:
        text = rest + decoder.decode(block, final=not block)
        end = len(text) if not block else max(text.rfind("\n"), text.rfind("\r")) + 1
        text, rest = text[:end], text[end:][:_LONGEST_LINE]
        text = without_escapes(text)
        skips = is_quiet(text)
        if skips:
            last = text.rstrip("\r\n").rfind("\n") + 1
            number, text = number + text.count("\n", 0, last), text[last:]
        pieces = _LINE_ENDS.split(text)
        for said, line_end in zip(pieces[::2], (*pieces[1::2], ""), strict=True):
            if said:
                yield LogLine(number=number, text=said[:_LONGEST_LINE])
            number += line_end in ("\n", "\r\n")
        block = file.read(_BLOCK_BYTES) if block else block


def _encoding(block: bytes) -> str:
    """Return the encoding of a log by its first bytes: UTF-16 as by PowerShell, else UTF-8."""
    if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    sample = block[:4096]
    if len(sample) > 1 and sample[1::2].count(0) > 0.4 * len(sample) / 2 and 0 not in sample[::2]:
        return "utf-16-le"
    return "utf-8-sig"


def shown_line(said: str) -> str:
    """Return a line as shown: a long one is cut behind a sentence, or else behind a word."""
    masked = masked_text(said, most=LONGEST_SHOWN + 1)
    if len(masked) <= LONGEST_SHOWN:
        return masked
    masked = masked[:LONGEST_SHOWN]
    ends = [found.start() + 1 for found in _SENTENCE_ENDS.finditer(masked)]
    if ends and ends[-1] > LONGEST_SHOWN // 2:
        return f"{masked[: ends[-1]]} ..."
    words, space, _ = masked.rpartition(" ")
    return f"{words} ..." if space and len(words) > LONGEST_SHOWN // 2 else masked
