"""Runs the matrix, continues a stopped run, and stores the measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_measurements import KeptAnswers, Measured, measured_here
from measuring_ranks import Ranks

from optimizer_matrix.judge import mismatch
from optimizer_matrix.matrix import row_of
from optimizer_matrix.results import compact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from optimizer_matrix.cases import Case

_DECIDES = ("cases.py", "makers.py", "train.py", "with_trainer.py")


def run_matrix(
    cases: Iterable[Case], folder: Path, *, anew: bool = False, tell: Callable[[str], None] = print
) -> Measured:
    """Return what the cases come to.

    Args:
        cases: what to run.
        folder: keeps measurements, so that a run that was stopped goes on, and logs.
        anew: forget earlier measurements.
        tell: takes a line for each case that does not agree with the table.
    """
    kept = KeptAnswers(folder / "optimizers", Path(__file__).parent, _DECIDES, anew=anew)
    has_libaio = has_async_io()
    measured: dict[str, Mapping[str, Any]] = {}
    with two_ranks(folder / "logs") as ranks:
        for case in cases:
            if case.uses_nvme and not has_libaio:
                measured[case.key] = {"not_run": "libaio is not installed"}
                continue
            if case.key not in kept.known:
                kept.keep(case.key, run_case(case, ranks))
            measured[case.key] = kept.known[case.key]
            if problem := mismatch(row_of(case), measured[case.key]):
                tell(f"{case.key}: {problem}")
    return measured_here(measured)


def two_ranks(log_folder: Path) -> Ranks:
    """Return the ranks that train cases."""
    return Ranks("optimizer_matrix.rank", 2, log_folder, limit_s=120)


def run_case(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Return what a case comes to; what does not agree with the table gets a second run, in new processes."""
    measured = compact(_worst(ranks.run(dataclasses.asdict(case))))
    if mismatch(row_of(case), measured):
        ranks.stop()
        measured = compact(_worst(ranks.run(dataclasses.asdict(case))))
    return measured


def _worst(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one answer for all ranks: an error before the hang that follows from it, and before a result."""
    for answer in answers:
        if "reference_error" in answer or answer.get("raised", "hangs") != "hangs":
            return answer
    return next(
        (answer for answer in answers if "raised" in answer),
        max(answers, key=lambda answer: answer.get("error", 0.0)),
    )


def has_async_io() -> bool:
    """Return True if DeepSpeed's op for NVMe can be built here."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with contextlib.redirect_stdout(io.StringIO()):
        return bool(AsyncIOBuilder().is_compatible(verbose=False))
