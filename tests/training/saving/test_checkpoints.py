"""Checkpoints that a run may resume from: those of the engine that will load them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from accelerators import settings
from refusals import refusal
from split_models import tiny

from zerofit.core.checkpoints import (
    MANIFEST_NAME,
    Manifest,
    SavedLayout,
    noted_checkpoints,
    write_manifest,
)
from zerofit.training.saving.checkpoints import describe_model, newest_by_sizes, newest_complete, save_whole

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


@pytest.mark.parametrize("name", ["gpt2", "lora"])
def test_a_checkpoint_describes_its_model_and_adapter_for_export(name: str, tmp_path: Path) -> None:
    describe_model(tiny(name)[0], tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    adapter = tmp_path / "adapter_config.json"
    assert adapter.exists() is (name == "lora")
    if name == "lora":
        assert json.loads(adapter.read_text())["r"] == 2


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


@pytest.mark.parametrize(
    ("more", "is_noted"), [({}, True), ({"can_resume": True}, True), ({"can_resume": False}, False)]
)
def test_a_save_is_noted_in_the_run_folder_if_a_run_can_resume_from_it(
    more: dict[str, bool], is_noted: bool, tmp_path: Path
) -> None:
    run_folder, saved = tmp_path / "run", tmp_path / "checkpoint-3"
    run_folder.mkdir()

    def write(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"1234")

    save_whole(saved, write, layout=_LAYOUT, run_folder=run_folder, step=3, **more)
    assert (saved / "weights.bin").read_bytes() == b"1234"
    assert (saved in noted_checkpoints(run_folder)) is is_noted


@pytest.mark.parametrize(("rank", "is_said"), [("0", True), ("1", False)])
def test_rank_0_says_which_checkpoints_are_skipped(
    rank: str,
    is_said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", rank)
    whole, broken = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    for folder in (whole, broken):
        folder.mkdir()
        write_manifest(folder, Manifest(layout=_LAYOUT, files=(), saved_at=0.0))
    (broken / MANIFEST_NAME).write_text("{")
    assert newest_by_sizes(str(tmp_path)) == str(whole)
    assert ("skips checkpoint-2" in capsys.readouterr().err) is is_said
