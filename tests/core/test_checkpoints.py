"""Complete and incomplete checkpoints of a folder, with and without a manifest."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zerofit.core.checkpoints import (
    MANIFEST_NAME,
    Manifest,
    SavedLayout,
    file_names,
    find_checkpoints,
    inspect_checkpoint,
    note_checkpoint,
    noted_checkpoints,
    remove_partial_of_run,
    sync_and_digest,
    write_manifest,
)

_LAYOUT = SavedLayout(
    engine="native", world_size=1, zero_stage=0, optimizer_offload="none", optimizer="torch.optim.adamw.AdamW"
)
_SHARD = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def _plain(folder: Path, *, saved_at: float = 1000.0) -> Path:
    """Write what accelerate saves on two ranks under DeepSpeed."""
    (folder / "pytorch_model").mkdir(parents=True)
    for name in (
        "pytorch_model/mp_rank_00_model_states.pt",
        *(f"pytorch_model/{_SHARD.format(rank)}" for rank in (0, 1)),
        *("random_states_0.pkl", "random_states_1.pkl", "scheduler.bin"),
    ):
        torch.save({"value": torch.arange(100)}, folder / name)
    (folder / "latest").write_text("pytorch_model")
    for path in folder.rglob("*"):
        os.utime(path, (saved_at, saved_at))
    return folder


def _committed(folder: Path, *, saved_at: float) -> Path:
    _plain(folder)
    files = tuple(sync_and_digest(folder, name) for name in file_names(folder))
    write_manifest(folder, Manifest(layout=_LAYOUT, files=files, saved_at=saved_at))
    return folder


def test_the_newest_comes_first_and_a_name_of_saving_is_none(tmp_path: Path) -> None:
    for number, saved_at in ((9, 3.0), (10, 2.0), (11, 1.0)):
        _committed(tmp_path / f"checkpoint_{number}", saved_at=saved_at)
    _plain(tmp_path / ".zerofit-saving.checkpoint_12" / "checkpoint_12")
    assert [one.path.name for one in find_checkpoints(tmp_path)] == [
        *("checkpoint_9", "checkpoint_10", "checkpoint_11")
    ]


def test_a_project_is_searched_in_its_checkpoints(tmp_path: Path) -> None:
    _committed(tmp_path / "checkpoints" / "checkpoint_0", saved_at=1.0)
    assert [one.path.name for one in find_checkpoints(tmp_path)] == ["checkpoint_0"]


def _cut(name: str) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def _flip(folder: Path) -> None:
    path = folder / "scheduler.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


_DAMAGES = [
    (lambda folder: None, None, None),
    (
        lambda folder: (folder / "random_states_1.pkl").unlink(),
        "random_states_1.pkl is missing",
        "the random states of rank 1 are missing",
    ),
    (
        lambda folder: (folder / "pytorch_model" / _SHARD.format(0)).unlink(),
        f"pytorch_model/{_SHARD.format(0)} is missing",
        "the optimizer states of rank 0 are missing",
    ),
    (
        lambda folder: (folder / "latest").unlink(),
        "latest is missing",
        "the file `latest`, which DeepSpeed writes last, is missing",
    ),
    (_cut("scheduler.bin"), None, "scheduler.bin is cut off"),
    (
        lambda folder: (folder / "scheduler.bin").write_bytes(b""),
        None,
        "scheduler.bin is empty",
    ),
    (_flip, "scheduler.bin differs from what was saved", None),
]


@pytest.mark.parametrize(("damage", "with_manifest", "without"), _DAMAGES)
def test_a_damage_is_named(
    tmp_path: Path, damage: Callable[[Path], object], with_manifest: str | None, without: str | None
) -> None:
    committed = _committed(tmp_path / "committed", saved_at=1.0)
    plain = _plain(tmp_path / "plain")
    for folder in (committed, plain):
        damage(folder)
    found = inspect_checkpoint(committed, digests=True).problem
    if with_manifest is None and without is not None:
        size = (committed / "scheduler.bin").stat().st_size
        assert found is not None
        assert found.startswith(f"scheduler.bin has {size} bytes, but was saved with")
    else:
        assert found == with_manifest
    assert inspect_checkpoint(plain).problem == without


_NO_FILES: dict[str, Callable[[Path], object]] = {
    "a link to nothing": lambda path: path.symlink_to("/nowhere/at/all"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("kind", _NO_FILES)
def test_what_is_no_file_is_a_problem_of_its_checkpoint_alone(tmp_path: Path, kind: str) -> None:
    for name in ("plain", "whole"):
        _plain(tmp_path / name)
    _NO_FILES[kind](tmp_path / "plain" / "extra.bin")
    problems = {found.path.name: found.problem for found in find_checkpoints(tmp_path)}
    assert problems == {"plain": "extra.bin is no file, or a link to none", "whole": None}


def test_a_manifest_of_garbage_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    folder = _committed(tmp_path / "one", saved_at=1.0)
    for text in ("", "[]", "{}", '{"version": 99}', '{"version": 1}'):
        (folder / MANIFEST_NAME).write_text(text)
        assert "can't be read" in str(inspect_checkpoint(folder).problem)


def test_a_run_notes_its_checkpoints_newest_first(tmp_path: Path) -> None:
    assert noted_checkpoints(tmp_path) == ()
    for name in ("a", "b\n"):
        note_checkpoint(tmp_path, Path(name))
    assert noted_checkpoints(tmp_path) == (Path("b\n"), Path("a"))


def test_an_interrupted_save_is_removed_and_the_checkpoint_that_it_replaced_is_put_back(
    tmp_path: Path,
) -> None:
    output, run_folder = tmp_path / "out", tmp_path / "run"
    run_folder.mkdir()
    for name in ("new", "kept", "replaced"):
        outer = output / f".zerofit-saving.{name}"
        _plain(outer / name)
        note_checkpoint(run_folder, outer)
    _committed(output / "kept", saved_at=1.0)
    _committed(output / ".zerofit-saving.replaced" / "replaced.before", saved_at=1.0)
    _plain(output / ".zerofit-saving.other" / "other")  # of another run, which may be alive
    remove_partial_of_run(run_folder)
    assert sorted(os.listdir(output)) == [".zerofit-saving.other", "kept", "replaced"]
    assert all(inspect_checkpoint(output / name, digests=True).is_complete for name in ("kept", "replaced"))
    assert noted_checkpoints(run_folder) == ()
