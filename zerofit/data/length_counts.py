"""count_lengths: a dataset's files to how many samples have which length, in memory that stays bounded."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from zerofit.data.counting import counted, lengths_of_ids
from zerofit.data.reading import BATCH_ROWS
from zerofit.data.reading_arrow import as_lists

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor, Future

    from zerofit.data.columns import Columns
    from zerofit.data.counting import Text, TextCounter
    from zerofit.data.reading import DataFile

_MOST_CHARACTERS = 2**20
"""Of the texts that are tokenized at once. ASSUMPTION: their tokens take some tens of MB."""
_AHEAD = 2
"""Pieces for each worker that are read before one is done. ASSUMPTION: enough that none waits."""


@dataclass(slots=True)
class Counts:
    """What was counted."""

    lengths: Counter[int] = field(default_factory=Counter)
    """Samples by length."""
    num_rows: int = 0
    """Rows that were read, those that a sample left out among them."""
    num_counted: int = 0
    num_null: int = 0
    """Counted rows without a value in a counted column."""
    num_other: int = 0
    """Those with a value that is no text, or no list of ids."""
    num_empty: int = 0
    """Those whose text or list is empty."""
    is_whole: bool = True
    """Whether every row was counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows are counted."""

    limit: int | None = None
    """Most rows, from the first on; None for all."""
    share: float | None = None
    """Of the rows, drawn at random; None for all."""
    seed: int = 0


def count_lengths(
    files: Sequence[DataFile],
    columns: Columns,
    counter: TextCounter,
    *,
    selection: Selection,
    num_workers: int,
    on_progress: Callable[[int, int], None],
) -> Counts:
    """Return how many samples have which length.

    One batch of rows is held for each worker, and a few that wait; of the samples only the counts stay.

    Args:
        files: read one after the other.
        columns: what of them is counted.
        counter: what counts text.
        selection: which rows are counted.
        num_workers: processes that count; 0 for a thread of this one, which is enough for a counter that
            itself uses all cores.
        on_progress: told the rows that are counted and the bytes that are read.

    Raises:
        UserError: a file can't be read.
    """
    counts = Counts()
    rows = _selected(files, columns, selection, counts)
    if columns.is_tokenized:
        for values, bytes_read in rows:
            ids = lengths_of_ids(values)
            counts.lengths.update(ids.lengths)
            counts.num_counted += len(ids.lengths)
            counts.num_null += ids.num_null
            counts.num_other += ids.num_other
            counts.num_empty += ids.lengths.count(0) - ids.num_null - ids.num_other
            on_progress(counts.num_counted, bytes_read)
        return counts
    with _executor(counter, num_workers) as executor:
        waiting: deque[tuple[Future[Counter[int]], int, int]] = deque()

        def take() -> None:
            future, size, bytes_read = waiting.popleft()
            counts.lengths.update(future.result())
            counts.num_counted += size
            on_progress(counts.num_counted, bytes_read)

        try:
            for samples, bytes_read in _pieces(rows, counts):
                waiting.append((_submit(executor, counter, samples), len(samples), bytes_read))
                if len(waiting) > _AHEAD * max(1, num_workers):
                    take()
            while waiting:
                take()
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return counts


def _selected(
    files: Sequence[DataFile], columns: Columns, selection: Selection, counts: Counts
) -> Iterator[tuple[Sequence[Any], int]]:
    """Yield (columns of some rows, bytes read of all files) of the rows that are to be counted."""
    draw, done_bytes, taken = random.Random(selection.seed), 0, 0
    for file in files:
        for batch in file.batches(columns.names):
            values: Sequence[Any] = batch.columns
            size = len(values[0])
            counts.num_rows += size
            if selection.share is not None:
                kept = [index for index in range(size) if draw.random() < selection.share]
                counts.is_whole &= len(kept) == size
                values = [_at(column, kept) for column in values]
            if selection.limit is not None and taken + len(values[0]) > selection.limit:
                values = [column[: selection.limit - taken] for column in values]
                counts.is_whole = False
            taken += len(values[0])
            if len(values[0]):
                yield values, done_bytes + batch.bytes_read
            if not counts.is_whole and selection.limit is not None and taken >= selection.limit:
                return
        done_bytes += file.size_bytes


def _at(column: Any, kept: list[int]) -> Any:
    return [column[index] for index in kept] if isinstance(column, list) else column.take(kept)


def _pieces(
    rows: Iterator[tuple[Sequence[Any], int]], counts: Counts
) -> Iterator[tuple[list[tuple[Text, ...]], int]]:
    """Yield samples that are few enough to be tokenized at once, and the bytes read of all files."""
    for columns, bytes_read in rows:
        samples: list[tuple[Text, ...]] = []
        characters = 0
        for row in itertools.chain.from_iterable(zip(*part, strict=True) for part in as_lists(columns)):
            sample = _sample(row, counts)
            samples.append(sample)
            characters += sum(map(len, sample))
            if len(samples) == BATCH_ROWS or characters > _MOST_CHARACTERS:
                yield samples, bytes_read
                samples, characters = [], 0
        if samples:
            yield samples, bytes_read


def _sample(row: tuple[Any, ...], counts: Counts) -> tuple[Text, ...]:
    """Return a row's texts; what is no text counts as an empty one."""
    if all(type(value) is str for value in row):
        counts.num_empty += not any(row)
        return row
    if any(value is None for value in row):
        counts.num_null += 1
    elif all(isinstance(value, list) and all(isinstance(one, str) for one in value) for value in row):
        counts.num_empty += not any(row)
        return row
    else:
        counts.num_other += 1
    return tuple(value if isinstance(value, str) else "" for value in row)


_counter: TextCounter | None = None
"""Of a worker process."""


def _executor(counter: TextCounter, num_workers: int) -> Executor:
    if not num_workers:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(
        num_workers, mp_context=get_context("spawn"), initializer=_begin_worker, initargs=(counter,)
    )


def _begin_worker(counter: TextCounter) -> None:
    global _counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _counter = counter


def _submit(
    executor: Executor, counter: TextCounter, samples: list[tuple[Text, ...]]
) -> Future[Counter[int]]:
    if isinstance(executor, ThreadPoolExecutor):
        return executor.submit(counted, counter, samples)
    return executor.submit(_count_in_worker, samples)


def _count_in_worker(samples: list[tuple[Text, ...]]) -> Counter[int]:
    assert _counter is not None
    return counted(_counter, samples)
