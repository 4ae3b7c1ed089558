"""What the ranks have generated: in memory, and on disk as it comes; put together when all have ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.generation.generation_job import Completion, FinishReason, Generated
from zerofit.generation.results.parts import Parts

if TYPE_CHECKING:
    from zerofit.generation.question import Question
    from zerofit.generation.ranks.ranks import Ranks
    from zerofit.generation.results.parts import Document


class Results:
    """One rank's results, and those that an earlier run left on disk.

    Args:
        ranks: all of them.
        question: what they were asked.
        parts: where results go; None where they are kept in memory alone.
        done: prompts whose results an earlier run left.
    """

    def __init__(self, ranks: Ranks, question: Question, parts: Parts | None, done: frozenset[int]) -> None:
        self._ranks = ranks
        self._question = question
        self._parts = parts
        self._done = done
        self._found: list[Generated] = []

    def has_all(self, indices: Iterable[int]) -> bool:
        """Return whether an earlier run left the results of all these prompts."""
        return self._done.issuperset(indices)

    def keep(self, found: Sequence[Generated]) -> None:
        """Keep what this rank has generated; it is on disk when this returns.

        Raises:
            UserError: it can't be written.
        """
        new = [each for each in found if each.index not in self._done]
        if self._parts is not None and new:
            self._parts.write([to_document(each) for each in new])
        self._found += new

    def finish(self, describe: Callable[[dict[str, Any]], Document] | None) -> list[Generated]:
        """Return the results that this rank is to get, in order, when all ranks have ended.

        Args:
            describe: gives what the file gets of a document; None for the document as it is.

        Raises:
            UserError: the file can't be written; what was generated stays beside it.
        """
        own = list(self._found)
        if self._parts is not None and self._ranks.rank == 0:
            own += [from_document(self._parts.done[index]) for index in sorted(self._done)]
        self._ranks.agreed(lambda: self._assemble(describe))
        everything = sorted((each for part in self._ranks.share_all(own) for each in part), key=_index)
        begin = self._question.own.start
        return [
            dataclasses.replace(each, index=each.index - begin)
            for each in everything
            if each.index in self._question.own
        ]

    def _assemble(self, describe: Callable[[dict[str, Any]], Document] | None) -> None:
        if self._parts is not None and self._ranks.rank == 0:
            self._parts.assemble(len(self._question.prompts), describe=describe)


@contextmanager
def open_results(
    ranks: Ranks, question: Question, *, out: Path | None, resume: bool, fingerprint: str | None
) -> Iterator[Results]:
    """Hold the results of all ranks open; all of them enter this.

    Args:
        ranks: all of them.
        question: what they were asked.
        out: the file for all results; None for none.
        resume: whether unfinished results there are continued.
        fingerprint: of all that decides about the results; None for what is known of the question.

    Raises:
        UserError: on every rank: the results can't be written there.
    """
    if out is None:
        yield Results(ranks, question, None, frozenset())
        return
    # Rank 0's counts: nodes with copies of the model have files of other times.
    text = ranks.share(fingerprint or question.fingerprint())[0]

    def open_parts() -> Parts:
        return Parts.open(
            out,
            fingerprint=text,
            rank=ranks.rank,
            world_size=ranks.size,
            resume=resume,
            batch_size=question.batch_size,
        )

    first = ranks.agreed(lambda: open_parts() if ranks.rank == 0 else None)
    try:
        parts = ranks.agreed(lambda: first or open_parts())
    except BaseException:
        if first is not None:
            first.close()
        raise
    with parts:
        ranks.agreed(lambda: parts.check_ranks() if ranks.rank == 0 else None)
        # Rank 0's look decides: a rank of a killed run may have lived on for a moment.
        done = ranks.share(frozenset(parts.done) if ranks.rank == 0 else None)[0]
        yield Results(ranks, question, parts, done or frozenset())


def to_document(result: Generated) -> Document:
    """Return what is written of a result."""
    return {
        "index": result.index,
        "num_prompt_tokens": result.num_prompt_tokens,
        "completions": [
            {
                "text": each.text,
                "finish_reason": str(each.finish_reason),
                "num_new_tokens": len(each.tokens),
                "tokens": list(each.tokens),
            }
            for each in result.completions
        ],
    }


def from_document(document: dict[str, Any]) -> Generated:
    """Return the result that to_document() wrote."""
    completions = tuple(
        Completion(
            tokens=tuple(each["tokens"]),
            text=each["text"],
            finish_reason=FinishReason(each["finish_reason"]),
        )
        for each in document["completions"]
    )
    return Generated(
        index=document["index"], num_prompt_tokens=document["num_prompt_tokens"], completions=completions
    )


def _index(result: Generated) -> int:
    return result.index
