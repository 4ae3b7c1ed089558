"""Estimates on disk: what shares them, and what a damaged file does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planning_problems import problem

from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.plan import Topology
from zerofit.core.request import Request
from zerofit.planning.estimate_cache import KeptEstimates
from zerofit.planning.problem import Problem

_PROBLEM = problem(num_gpus=1, sequence_length=16)
_TERM = Term(name="weights", num_bytes=5, holder=Holder.TENSORS, formula="f", source="s")
_ESTIMATE = MemoryEstimate(
    phases=(PhaseMemory(phase=RunPhase.STEP, terms=(_TERM,)),), uncertainty=0.1, uncertainty_source="s"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where estimates are kept, with those of one problem in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = KeptEstimates(_PROBLEM, "source")
    kept.estimates.update({"fits": _ESTIMATE, "does not": None})
    kept.write()
    return tmp_path / "zerofit" / "estimates"


@pytest.mark.parametrize(
    ("asked", "source", "is_shared"),
    [
        (_PROBLEM, "source", True),
        (replace(_PROBLEM, workload=replace(_PROBLEM.workload, global_batch_size=9)), "source", True),
        (replace(_PROBLEM, request=Request(micro_batch_size=2)), "source", True),
        (_PROBLEM.with_length(32), "source", False),
        (replace(_PROBLEM, topology=Topology(world_size=2)), "source", False),
        (replace(_PROBLEM, versions=replace(_PROBLEM.versions, torch="2.14.0")), "source", False),
        (_PROBLEM, "another model", False),
    ],
)
def test_what_shares_estimates(asked: Problem, source: str, is_shared: bool) -> None:
    found = KeptEstimates(asked, source).estimates
    assert found == ({"fits": _ESTIMATE, "does not": None} if is_shared else {})


@pytest.mark.parametrize("content", [b"", b"{", b'{"fits": 3}', b"[]"])
def test_a_damaged_file_is_as_good_as_none(folder: Path, content: bytes) -> None:
    (file,) = folder.iterdir()
    file.write_bytes(content)
    assert KeptEstimates(_PROBLEM, "source").estimates == {}


def test_without_anything_new_nothing_is_written(folder: Path) -> None:
    (file,) = folder.iterdir()
    before = file.stat().st_mtime_ns
    KeptEstimates(_PROBLEM, "source").write()
    assert file.stat().st_mtime_ns == before


def test_a_folder_that_cannot_be_made_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kept = KeptEstimates(_PROBLEM, "source")
    kept.estimates["fits"] = _ESTIMATE
    kept.write()
    assert KeptEstimates(_PROBLEM, "source").estimates == {}
