"""Checkpoints that a run may resume from: those of the engine that will load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from accelerators import settings
from refusals import refusal

from zerofit.core.checkpoints import Manifest, SavedLayout, write_manifest
from zerofit.training.checkpoints import newest_complete

if TYPE_CHECKING:
    from pathlib import Path

_STATES = {"DeepSpeed": "pytorch_model/mp_rank_00_model_states.pt", "PyTorch alone": "optimizer.bin"}
"""A file that each engine saves."""


_LAYOUT = SavedLayout(engine="", world_size=1, zero_stage=0, optimizer_offload="none", optimizer=None)


def _checkpoint(folder: Path, saved_by: str) -> Path:
    saved = folder / "checkpoint-1"
    states = saved / _STATES[saved_by]
    states.parent.mkdir(parents=True)
    states.touch()
    write_manifest(saved, Manifest(layout=_LAYOUT, files=(), saved_at=0.0))
    return saved


@pytest.mark.parametrize("saved_by", _STATES)
def test_the_engine_that_saved_a_checkpoint_resumes_from_it(saved_by: str, tmp_path: Path) -> None:
    saved = _checkpoint(tmp_path, saved_by)
    newest = newest_complete(tmp_path, settings(uses_deepspeed=saved_by == "DeepSpeed"))
    assert newest is not None
    assert newest.path == saved


@pytest.mark.parametrize(
    ("saved_by", "now", "engine"),
    [("DeepSpeed", "PyTorch alone", "deepspeed"), ("PyTorch alone", "DeepSpeed", "native")],
)
def test_the_other_engine_does_not(saved_by: str, now: str, engine: str, tmp_path: Path) -> None:
    saved = _checkpoint(tmp_path, saved_by)
    refused = refusal(newest_complete, tmp_path, settings(uses_deepspeed=now == "DeepSpeed"))
    found = f"{saved} was saved by {saved_by}, and this run uses {now}"
    assert (refused.rule, refused.found) == ("checkpoint-of-other-engine", found)
    assert refused.fix.startswith(f"run with --engine {engine}, ")
