"""Counts the lengths of a dataset's samples: files to a histogram, in constant memory."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.data.columns import chosen_columns
from zerofit.data.files import data_files
from zerofit.data.known_lengths import holds_ids, list_lengths
from zerofit.data.lengths import LengthHistogram
from zerofit.data.lengths.report import LengthUnit, MeasuredLengths
from zerofit.data.tokenizer_files import TokenCounter, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zerofit.data.columns import CountedColumns
    from zerofit.data.reading import DataFile
    from zerofit.data.tokenizer_files import Sample

    LengthCounter = Callable[[Sequence[Sample]], Iterable[int]]
    """Counts what each sample has."""

_MAX_CHARACTERS = 2**20
"""Maximum characters of text tokenized at once. ASSUMPTION: their tokens take some tens of MB."""


@dataclass(slots=True)
class _LengthCounts:
    """Samples by length, and the number of unusual rows."""

    lengths: Counter[int] = field(default_factory=Counter)
    """Samples by length."""
    num_rows: int = 0
    """Rows read, including those that random sampling skipped."""
    num_null: int = 0
    """Counted rows with a null in a counted column."""
    num_other: int = 0
    """Rows with a value that is neither text nor a list of ids."""
    num_empty: int = 0
    """Rows with empty text or an empty list."""
    is_whole: bool = True
    """True if every row was counted."""


def measure_files(
    sources: Sequence[str],
    *,
    tokenizer: str | None = None,
    text: tuple[str, ...] = (),
    split: str | None = None,
    unit: LengthUnit = LengthUnit.TOKENS,
    limit: int | None = None,
    share: float | None = None,
    on_progress: Callable[[int, int, int], None] = lambda num_samples, bytes_read, total_bytes: None,
) -> MeasuredLengths:
    """Return the lengths of the samples in files.

    Args:
        sources: files, patterns such as "data/*.jsonl", and folders written by save_to_disk.
        tokenizer: a tokenizer.json, a folder, or a hub id in the cache; not needed for ids.
        text: the text column, or the two of a pair; empty to guess.
        split: of a DatasetDict.
        unit: the unit of length.
        limit: maximum number of rows, from the start; None for all.
        share: share of rows to sample at random; None for all.
        on_progress: called with the number of samples counted, the bytes read, and the bytes of all files.

    Raises:
        UserError: a file, a column or the tokenizer does not exist or can't be read, or there are no samples.
    """
    files, notes = data_files(sources, split=split)
    subject = ", ".join(sources) if len(sources) < 4 else f"{len(files)} files, {sources[0]} first"
    heads = ((file, file.head()) for file in files)
    first, head = next(((file, head) for file, head in heads if head), (None, {}))
    if first is None:
        raise _empty(subject, "no rows")
    columns = chosen_columns(head, named=text, file=str(first.path))
    counter, counted = _counter(columns, unit, tokenizer)
    if isinstance(counter, TokenCounter) and not counter.is_fast:
        faster = "dataset.map(..., num_proc=8) tokenizes in several, and its ids can then be counted"
        notes = (*notes, f"{tokenizer} runs in Python, in one process: {faster}")
    counts = _LengthCounts()
    total_bytes = sum(file.size_bytes for file in files)
    batches = _selected(files, columns, counts, limit=limit, share=share)
    for lengths, bytes_read in _counted(batches, counter, counts):
        counts.lengths.update(lengths)
        on_progress(counts.lengths.total(), bytes_read, total_bytes)
    if not counts.lengths:
        raise _empty(subject, "no row was drawn" if counts.num_rows else "no rows")
    return MeasuredLengths(
        subject=subject,
        counted=counted,
        unit=LengthUnit.TOKENS if counter is None else unit,
        histogram=LengthHistogram.of(counts.lengths),
        is_whole=counts.is_whole,
        model_max_length=counter.model_max_length if isinstance(counter, TokenCounter) else None,
        notes=(*notes, *_odd_rows(counts, columns)),
    )


def _counter(
    columns: CountedColumns, unit: LengthUnit, tokenizer: str | None
) -> tuple[LengthCounter | None, str]:
    """Return the counter of a text's length, None for ids, and a description."""
    names = " and ".join(columns.names[:1] if columns.is_tokenized else columns.names)
    if columns.is_tokenized:
        masked = ", without those that the mask excludes" if len(columns.names) > 1 else ""
        return None, f"column {names}, already tokenized{masked}"
    if unit is not LengthUnit.TOKENS:
        if tokenizer is not None:
            raise UserError(
                "count-and-tokenizer",
                "a tokenizer counts tokens",
                found=f"--tokenizer {tokenizer} with --count {unit.value}",
                why="words and characters are counted without a tokenizer",
                fix="leave out one of the two",
            )
        counter = _count_words if unit is LengthUnit.WORDS else _count_characters
        return counter, f"{unit.value} (not tokens) of the column {names}"
    if tokenizer is None:
        raise UserError(
            "tokenizer-not-named",
            "tokens are counted with a tokenizer",
            found=f"the column {names}, and no --tokenizer",
            why="the number of tokens depends on the model's tokenizer",
            fix="pass --tokenizer with the model's folder or tokenizer.json, or --count words",
        )
    pair = " as a pair" if len(columns.names) > 1 else ""
    counted = f"tokens of the column {names}{pair}, special ones included, by {tokenizer}"
    return load_tokenizer(tokenizer), counted


def _count_words(samples: Sequence[Sample]) -> list[int]:
    """Return the number of whitespace-separated words of each sample."""
    return [
        sum(len(text if isinstance(text, list) else text.split()) for text in sample) for sample in samples
    ]


def _count_characters(samples: Sequence[Sample]) -> list[int]:
    return [sum(len("".join(text)) for text in sample) for sample in samples]


def _selected(
    files: Sequence[DataFile],
    columns: CountedColumns,
    counts: _LengthCounts,
    *,
    limit: int | None,
    share: float | None,
) -> Iterator[tuple[Sequence[Any], int]]:
    """Yield (columns of some rows, bytes read of all files) for the rows to count."""
    draw, done_bytes, taken = random.Random(0), 0, 0
    for file in files:
        for batch in file.batches(columns.names):
            values: Sequence[Any] = batch.columns
            num_rows = len(values[0])
            counts.num_rows += num_rows
            if share is not None:
                kept = [index for index in range(num_rows) if draw.random() < share]
                values = [_at(column, kept) for column in values]
            if limit is not None:
                values = [column[: limit - taken] for column in values]
            counts.is_whole &= len(values[0]) == num_rows
            taken += len(values[0])
            if len(values[0]):
                yield values, done_bytes + batch.bytes_read
            if taken == limit and not counts.is_whole:
                return
        done_bytes += file.size_bytes


def _at(column: Any, kept: list[int]) -> Any:
    return [column[index] for index in kept] if isinstance(column, list) else column.take(kept)


def _counted(
    batches: Iterator[tuple[Sequence[Any], int]], counter: LengthCounter | None, counts: _LengthCounts
) -> Iterator[tuple[Iterable[int], int]]:
    """Yield the lengths of some samples, and the bytes read of all files."""
    if counter is None:
        for values, bytes_read in batches:
            yield _lengths_of_ids(values, counts), bytes_read
        return
    for samples, bytes_read in _pieces(batches, counts):
        yield counter(samples), bytes_read


def _pieces(
    batches: Iterator[tuple[Sequence[Any], int]], counts: _LengthCounts
) -> Iterator[tuple[list[Sample], int]]:
    """Yield groups of samples that are small enough to tokenize at once, and the bytes read of all files."""
    for columns, bytes_read in batches:
        samples: list[Sample] = []
        num_characters = 0
        lists = [column if isinstance(column, list) else column.to_pylist() for column in columns]
        for row in zip(*lists, strict=True):
            sample = _sample(row, counts)
            samples.append(sample)
            num_characters += sum(map(len, sample))
            if num_characters > _MAX_CHARACTERS:
                yield samples, bytes_read
                samples, num_characters = [], 0
        if samples:
            yield samples, bytes_read


def _sample(row: tuple[Any, ...], counts: _LengthCounts) -> Sample:
    """Return a row's texts; a value that is not text becomes an empty one."""
    if any(value is None for value in row):
        counts.num_null += 1
    elif all(isinstance(value, str) for value in row) or all(map(_is_words, row)):
        counts.num_empty += not any(row)
        return row
    else:
        counts.num_other += 1
    return tuple(value if isinstance(value, str) else "" for value in row)


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _lengths_of_ids(columns: Sequence[Any], counts: _LengthCounts) -> list[int]:
    """Return the length of each tokenized sample; 0 if it is not a list of ids.

    Args:
        columns: the ids, and their mask if there is one, which is then counted.
        counts: counts unusual samples.
    """
    ids, mask = columns[0], columns[1] if len(columns) > 1 else None
    if isinstance(ids, list):
        lengths = list(map(_length_of_ids, ids, mask or itertools.repeat(None)))
        num_null, num_odd = ids.count(None), sum(not _is_ids(row) for row in ids)
    else:
        num_null = ids.null_count
        if holds_ids(ids.type):
            has_mask = mask is not None and holds_ids(mask.type)
            lengths, num_odd = list_lengths(mask if has_mask else ids, is_mask=has_mask), num_null
        else:
            lengths, num_odd = [0] * len(ids), len(ids)
    counts.num_null += num_null
    counts.num_other += num_odd - num_null
    counts.num_empty += lengths.count(0) - num_odd
    return lengths


def _length_of_ids(ids: Any, mask: Any) -> int:
    if not _is_ids(ids):
        return 0
    return sum(map(bool, mask)) if isinstance(mask, list) else len(ids)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and isinstance(next(iter(value), 0), int)


def _odd_rows(counts: _LengthCounts, columns: CountedColumns) -> tuple[str, ...]:
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


def _empty(subject: str, found: str) -> UserError:
    return UserError(
        "data-empty",
        "there is no sample to count",
        found=f"{subject}: {found}",
        why="a report needs at least one sample",
        fix="name another file" if found == "no rows" else "draw more with --sample or --limit",
    )
