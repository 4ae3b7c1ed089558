"""Whether predictions of what fits came true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from measuring.results import TrialState

from gpu_truth.verdict import kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpu_truth.results import CaseResult, RegretResult

_KNOWN = (TrialState.DONE, TrialState.OUT_OF_MEMORY)
"""Ends that say whether it fitted; what was too slow or failed says nothing of that."""
_Ended = tuple[str, int, int, TrialState]
"""Key, predicted bytes, the bytes that there are, and how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Predictions of what fits against what did."""

    num_right: int
    did_not: tuple[str, ...]
    """Keys of what was predicted to fit, and did not."""
    did: tuple[str, ...]
    """Keys of what was predicted not to fit, and did."""


def fits_of_cases(results: Iterable[CaseResult], *, memory_bytes: int) -> Fits:
    """Return how cases fitted a GPU, those that calibrate too.

    Args:
        results: those without a prediction for a GPU are passed over.
        memory_bytes: what the GPU has for a process, against which the prediction for the device stands.
    """

    def ended() -> Iterator[_Ended]:
        for one in results:
            if one.predicted is not None and one.predicted.device_bytes is not None:
                yield one.case.key, one.predicted.device_bytes, memory_bytes, one.outcome.state

    return _fits(ended())


def fits_of_regret(results: Iterable[RegretResult]) -> Fits:
    """Return how strategies fitted the limits of torch's allocator; each key names question and strategy."""

    def ended() -> Iterator[_Ended]:
        for question in results:
            for one in kept(question):
                if one.predicted_bytes is not None:
                    key = f"{question.key}: {one.name}"
                    yield key, one.predicted_bytes, question.limit_bytes, one.outcome.state

    return _fits(ended())


def _fits(ended: Iterable[_Ended]) -> Fits:
    known = [
        (key, predicted <= limit, state is TrialState.DONE)
        for key, predicted, limit, state in ended
        if state in _KNOWN
    ]
    return Fits(
        num_right=sum(said == fitted for _, said, fitted in known),
        did_not=tuple(key for key, said, fitted in known if said and not fitted),
        did=tuple(key for key, said, fitted in known if fitted and not said),
    )
