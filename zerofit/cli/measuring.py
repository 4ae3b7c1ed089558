"""Counts the lengths of a dataset's samples, from files or as a script has them, and shows how far it is."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import click

from zerofit.cli.output.console import Console
from zerofit.core.errors import UserError
from zerofit.data.columns import chosen_columns, header_notes
from zerofit.data.counting import Characters, Words
from zerofit.data.files import data_files, is_table
from zerofit.data.length_counts import Counts, count_lengths
from zerofit.data.lengths import LengthHistogram
from zerofit.data.lengths.report import Measured, Unit
from zerofit.scripts.capture.with_progress import captured
from zerofit.scripts.target import script_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.core.capture import Capture
    from zerofit.data.columns import Columns
    from zerofit.data.counting import TextCounter
    from zerofit.data.length_counts import Selection
    from zerofit.data.reading import DataFile
    from zerofit.data.tokenizer_files import LoadedTokenizer

_MOST_WORKERS = 8
"""That are started without being asked for. ASSUMPTION: each takes some hundred MB."""
_UPDATES_PER_S = 5
_INSTEAD = "name the files of its dataset: `zerofit data FILE --tokenizer DIR`"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFlags:
    """What the flags say of a dataset's files."""

    tokenizer: str | None
    text: tuple[str, ...]
    split: str | None
    unit: Unit
    num_workers: int | None


def measure_files(sources: Sequence[str], flags: FileFlags, selection: Selection) -> Measured:
    """Return the lengths of the samples in files.

    Raises:
        UserError: a file, a column or the tokenizer is not there or can't be read; there is no sample.
    """
    files, notes = data_files(sources, split=flags.split)
    subject = ", ".join(sources) if len(sources) < 4 else f"{len(files)} files, {sources[0]} first"
    first, head = _first_rows(files, subject)
    if is_table(first):
        notes = (*notes, *header_notes(tuple(head), file=str(first.path)))
    columns = chosen_columns(head, named=flags.text, file=str(first.path))
    counter, counted, loaded = _counter(flags, columns, head)
    if loaded is not None and loaded.warning:
        click.echo(loaded.warning, err=True)
    num_workers = flags.num_workers
    if num_workers is None:
        is_slow = loaded is not None and not loaded.is_fast
        num_workers = min(os.cpu_count() or 1, _MOST_WORKERS) if is_slow else 0
    with _Progress(sum(file.size_bytes for file in files)) as progress:
        counts = count_lengths(
            files, columns, counter, selection=selection, num_workers=num_workers, on_progress=progress.tell
        )
    if not counts.num_counted:
        raise _empty(subject, "no row was drawn" if counts.num_rows else "no rows")
    return Measured(
        subject=subject,
        counted=counted,
        unit=flags.unit,
        histogram=LengthHistogram.of(counts.lengths),
        is_whole=counts.is_whole,
        model_max_length=None if loaded is None else loaded.model_max_length,
        notes=(*notes, *_told(counts, columns)),
    )


def measure_script(target: tuple[str, ...], *, limit_s: float) -> tuple[Measured, Capture]:
    """Return the lengths of the samples that a script trains on, and what else was seen of it.

    Raises:
        UserError: it does not come to a training, or its samples have no tokens.
    """
    with captured(target, limit_s=limit_s, instead=_INSTEAD, observer=Console()) as script:
        capture = script.capture
    lengths = capture.lengths
    if lengths is None or not lengths.counts:
        raise UserError(
            "script-without-lengths",
            "the script's samples have no tokens",
            found=script_of(target),
            why="none of its first batches has input_ids or a mask, from which lengths are counted",
            fix="name the files of its dataset in place of the script",
        )
    counted = "tokens of the samples that it trains on, as it cuts them"
    part = "they are those of its first batches: its dataset shows no lengths without reading all of it"
    measured = Measured(
        subject=script_of(target),
        counted=counted,
        unit=Unit.TOKENS,
        histogram=LengthHistogram(counts=lengths.counts),
        is_whole=lengths.is_whole,
        notes=() if lengths.is_whole else (part,),
    )
    return measured, capture


def _first_rows(files: Sequence[DataFile], subject: str) -> tuple[DataFile, dict[str, list[Any]]]:
    for file in files:
        head = file.head()
        if any(head.values()):
            return file, head
    raise _empty(subject, "no rows")


def _empty(subject: str, found: str) -> UserError:
    return UserError(
        "data-empty",
        "there is no sample to count",
        found=f"{subject}: {found}",
        why="a report is of one sample at least",
        fix="name another file" if found == "no rows" else "draw more with --sample or --limit",
    )


def _counter(
    flags: FileFlags, columns: Columns, head: dict[str, list[Any]]
) -> tuple[TextCounter, str, LoadedTokenizer | None]:
    """Return what counts, what it counts in words, and the tokenizer where it is one."""
    names = " and ".join(columns.names[:1] if columns.is_tokenized else columns.names)
    if columns.is_tokenized:
        if flags.tokenizer is not None or flags.unit is not Unit.TOKENS:
            flag = f"--tokenizer {flags.tokenizer}" if flags.tokenizer else f"--count {flags.unit.value}"
            raise UserError(
                "already-tokenized",
                "the column holds ids, which are tokens already",
                found=f"{flag} with the column {names}",
                why="a tokenizer, or a count of words, is for text",
                fix=f"leave out {flag.split()[0]}, or name a column of text with --text",
            )
        masked = ", those that the mask leaves out not counted" if len(columns.names) > 1 else ""
        return Words(), f"column {names}, tokenized already{masked}", None
    if flags.unit is not Unit.TOKENS:
        if flags.tokenizer is not None:
            raise UserError(
                "count-and-tokenizer",
                "a tokenizer counts tokens",
                found=f"--tokenizer {flags.tokenizer} with --count {flags.unit.value}",
                why="words and characters are counted without one",
                fix="leave out one of the two",
            )
        counter = Words() if flags.unit is Unit.WORDS else Characters()
        return counter, f"{flags.unit.value} (not tokens) of the column {names}", None
    if flags.tokenizer is None:
        raise UserError(
            "tokenizer-not-named",
            "tokens are counted with a tokenizer",
            found=f"the column {names}, and no --tokenizer",
            why="the same text has other tokens for another model",
            fix="give --tokenizer with the model's folder or tokenizer.json, or count with --count words",
        )
    from zerofit.data.tokenizer_files import load_tokenizer

    texts = [value for value in head[columns.names[0]] if isinstance(value, str)]
    loaded = load_tokenizer(flags.tokenizer, texts=texts)
    pair = " as a pair" if len(columns.names) > 1 else ""
    counted = f"tokens of the column {names}{pair}, special ones included, by {flags.tokenizer}"
    return loaded.counter, counted, loaded


def _told(counts: Counts, columns: Columns) -> tuple[str, ...]:
    """Return what was odd, one sentence each."""
    empty, value = ("no tokens", "no list of ids") if columns.is_tokenized else ("empty text", "no text")
    names = columns.names[:1] if columns.is_tokenized else columns.names
    sentences = (
        (counts.num_null, f"without a value in {' or '.join(names)}: counted as {empty}"),
        (counts.num_other, f"with a value that is {value}: counted as {empty}"),
        (counts.num_empty, f"of {empty}"),
    )
    return tuple(
        f"{number:,} {'sample' if number == 1 else 'samples'} {words}"
        for number, words in sentences
        if number
    )


class _Progress:
    """A bar with rate and time left, on a terminal and the first rank only.

    Args:
        total_bytes: of all files on disk.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._bar: Any = None
        self._task: Any = None
        self._started = self._last = time.monotonic()
        self._num_rows = 0

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("counting"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=self._total_bytes, rate="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is KeyboardInterrupt:
            words = f"stopped after {self._num_rows:,} samples; --limit or --sample report on a part"
            click.echo(f"zerofit: {words}", err=True)

    def tell(self, num_rows: int, bytes_read: int) -> None:
        """Show how far it is, a few times a second."""
        self._num_rows = num_rows
        now = time.monotonic()
        if self._bar is not None and now - self._last > 1 / _UPDATES_PER_S:
            self._last = now
            rate = num_rows / max(1e-9, now - self._started)
            self._bar.update(self._task, completed=bytes_read, rate=f"{num_rows:,} samples, {rate:,.0f}/s")
