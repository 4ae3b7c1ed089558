"""Results of all ranks: in memory, and on disk as they are made; merged when all ranks have finished."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.generation.generation_job import Completion, FinishReason, Generated
from zerofit.generation.results.parts import PartFiles

if TYPE_CHECKING:
    from zerofit.generation.request import GenerationRequest
    from zerofit.generation.results.parts import Document
    from zerofit.ranks.exchange import Ranks


class Results:
    """One rank's results, and those on disk of an earlier run."""

    def __init__(
        self, ranks: Ranks, request: GenerationRequest, parts: PartFiles | None, done: frozenset[int]
    ) -> None:
        self._ranks = ranks
        self._request = request
        self._parts = parts
        self._done = done
        self._found: list[Generated] = []

    def has_all(self, indices: Iterable[int]) -> bool:
        """Return True if an earlier run left the results of all these prompts."""
        return self._done.issuperset(indices)

    def keep(self, found: Sequence[Generated]) -> None:
        """Store results of this rank; they are on disk when this returns."""
        new = [each for each in found if each.index not in self._done]
        if self._parts is not None and new:
            self._parts.write([to_document(each) for each in new])
        self._found += new

    def finish(self) -> list[Generated]:
        """Return the results for this rank, in order, when all ranks have finished.

        Raises:
            UserError: the file can't be written; the parts are kept.
        """
        own = list(self._found)
        parts = self._parts if self._ranks.rank == 0 else None
        if parts is not None:
            own += [from_document(parts.done[index]) for index in sorted(self._done)]
        self._ranks.agreed(lambda: self._assemble(parts))
        shared = self._ranks.share_all(own)
        everything = sorted((each for part in shared for each in part), key=lambda one: one.index)
        begin = self._request.own.start
        return [
            replace(each, index=each.index - begin) for each in everything if each.index in self._request.own
        ]

    def _assemble(self, parts: PartFiles | None) -> None:
        if parts is not None:
            parts.assemble(len(self._request.prompts), describe=self._request.options.describe)


@contextmanager
def open_results(ranks: Ranks, request: GenerationRequest) -> Iterator[Results]:
    """Open the results of all ranks; all of them enter this context."""
    out = request.options.out
    if out is None:
        yield Results(ranks, request, None, frozenset())
        return
    # Rank 0's count: nodes with copies of the model have files of different times.
    fingerprint = ranks.share(request.options.fingerprint or request.fingerprint())[0]

    def open_parts() -> PartFiles:
        return PartFiles(
            out,
            fingerprint=fingerprint,
            rank=ranks.rank,
            world_size=ranks.size,
            resume=request.options.resume,
            batch_size=request.batch_size,
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
        # Rank 0 decides: a rank of a killed run may have lived on for a moment.
        done = ranks.share(frozenset(parts.done) if ranks.rank == 0 else None)[0]
        yield Results(ranks, request, parts, done or frozenset())


def to_document(result: Generated) -> Document:
    """Return a result as JSON document."""
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
    """Return the result in a document of to_document()."""
    completions = tuple(
        Completion(
            tokens=tuple(each["tokens"]), text=each["text"], finish_reason=FinishReason(each["finish_reason"])
        )
        for each in document["completions"]
    )
    return Generated(
        index=document["index"], num_prompt_tokens=document["num_prompt_tokens"], completions=completions
    )
