"""Checkpoints whose files run code: nothing of them runs on the way through export, resume and generate."""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generate_runs import generate_run, make_model
from runs import Run, run_command
from safetensors.torch import load_file
from torch.distributed.checkpoint import filesystem

from zerofit.core.errors import UserError
from zerofit.core.upstream.checkpoint_pickles import damage_of, loading_data_only

_LOOP = str(Path(__file__).parent / "scripts" / "resumable_loop.py")
_ZEROFIT = (sys.executable, "-m", "zerofit")
_PICKLES = {".pt", ".pkl", ".bin", ".pth", ".metadata", ".distcp"}


class Payload:
    """Makes a folder when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


class _Own:
    """A class of a script."""

    value = 1


def _poison(checkpoint: Path, markers: Path) -> int:
    """Put a payload into each pickle of a checkpoint; return their number."""
    (checkpoint / "zerofit-checkpoint.json").unlink(missing_ok=True)
    files = [file for file in checkpoint.rglob("*") if file.suffix in _PICKLES or file.name == ".metadata"]
    for file in files:
        payload = Payload(markers / f"ran-{file.name}")
        if file.name == ".metadata":
            file.write_bytes(pickle.dumps([payload]))
        else:
            torch.save([payload, torch.load(file, weights_only=False)], file)
    return len(files)


_REFUSED: dict[str, Callable[[Path], Any]] = {
    "a function": Payload,
    "in a state": lambda marker: {"module": {"weight": torch.ones(2)}, "args": Payload(marker)},
    "in a list": lambda marker: [1, [2, [Payload(marker)]]],
    "as a key": lambda marker: collections.OrderedDict([((Payload(marker),), 1)]),
    "a class of a script": lambda _: {"config": _Own()},
    "a builtin": lambda _: {"reader": map},
    "a lambda's module": lambda _: {"call": os.path.join},
}
_TAKEN: dict[str, Any] = {
    "tensors": {"a": torch.ones(2), "b": torch.Size([2]), "c": torch.float16},
    "numpy": {"state": ("MT19937", np.arange(4, dtype=np.uint32)), "mean": np.float64(0.5), "n": np.int64(3)},
    "plain": {"a": [1, 2.5, "x", None, True, b"y"], "b": collections.OrderedDict(a=1), "c": {1, 2}},
    "arguments": argparse.Namespace(lr=0.1, name="x"),
    "times": [datetime.datetime(2026, 1, 1), datetime.timedelta(seconds=1)],
    "a path": {"output": Path("/out")},
    "counts": collections.Counter("abc"),
}


@pytest.mark.parametrize("kind", _REFUSED)
@pytest.mark.parametrize("new_format", [True, False])
def test_a_pickle_that_names_code_is_refused_before_it_runs(
    tmp_path: Path, kind: str, new_format: bool
) -> None:
    file, marker = tmp_path / "state.pt", tmp_path / "ran"
    torch.save(_REFUSED[kind](marker), file, _use_new_zipfile_serialization=new_format)
    with pytest.raises(UserError) as raised, loading_data_only():
        torch.load(file, weights_only=False)
    assert raised.value.rule == "checkpoint-not-trusted"
    assert str(file) in raised.value.found
    assert not marker.exists()


@pytest.mark.parametrize("kind", _TAKEN)
def test_plain_values_are_loaded(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "state.pt"
    torch.save(_TAKEN[kind], file)
    with loading_data_only():
        found = torch.load(file, weights_only=False)
    assert str(found) == str(_TAKEN[kind])


_DAMAGED: dict[str, bytes] = {
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n",
    "a page": b"<!DOCTYPE html>\n<html><body>Sign in</body></html>",
    "JSON": b'{"error": "Repository not found"}',
    "text": b"Entry not found",
    "an archive": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
}


@pytest.mark.parametrize("kind", _DAMAGED)
def test_a_file_of_another_format_is_damaged_not_distrusted(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "state.pt"
    file.write_bytes(_DAMAGED[kind])
    with pytest.raises(UserError) as raised, loading_data_only():
        torch.load(file, weights_only=False)
    assert (raised.value.rule, raised.value.found.split(" ")[0]) == ("checkpoint-damaged", str(file))
    assert damage_of(file) == f"begins with {_DAMAGED[kind][:40]!r}"


def test_a_file_that_is_empty_or_cut_off_is_damaged(tmp_path: Path) -> None:
    for new_format in (True, False):
        whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
        torch.save({"a": torch.ones(1000)}, whole, _use_new_zipfile_serialization=new_format)
        assert damage_of(whole) is None
        cut.write_bytes(whole.read_bytes()[:-100])
        assert damage_of(cut) == ("is cut off" if new_format else None)
    whole.write_bytes(b"")
    assert damage_of(whole) == "is empty"


def test_a_refusal_that_a_library_turns_into_another_error_is_raised(tmp_path: Path) -> None:
    torch.save(Payload(tmp_path / "ran"), tmp_path / "state.pt")

    def reword() -> None:
        try:
            torch.load(tmp_path / "state.pt")
        except Exception as error:
            raise OSError("Unable to load weights") from error

    with pytest.raises(UserError, match="more than tensors"), loading_data_only():
        reword()
    assert not (tmp_path / "ran").exists()


def test_a_refusal_that_a_library_swallows_is_raised_in_the_end(tmp_path: Path) -> None:
    torch.save(Payload(tmp_path / "ran"), tmp_path / "state.pt")

    def swallow() -> None:
        try:
            torch.load(tmp_path / "state.pt", weights_only=False)
        except Exception:
            return

    with pytest.raises(UserError, match="more than tensors"), loading_data_only():
        swallow()
    assert not (tmp_path / "ran").exists()


def test_torch_is_as_before_afterwards(tmp_path: Path) -> None:
    before = (torch.load, filesystem.pickle)  # type: ignore[attr-defined]
    allowed = set(torch.serialization.get_safe_globals())
    with loading_data_only():
        assert torch.load is not before[0]
    assert (torch.load, filesystem.pickle) == before  # type: ignore[attr-defined]
    assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.parametrize(
    "value", [[Payload(Path("/nowhere/ran"))], {"a": os.getcwd}, eval, pickle.loads, torch.load]
)
def test_the_index_of_a_sharded_checkpoint_is_read_as_data(tmp_path: Path, value: Any) -> None:
    folder = tmp_path / "shards"
    torch.distributed.checkpoint.save({"w": torch.ones(3), "n": 7}, checkpoint_id=folder, no_dist=True)
    reader = filesystem.FileSystemReader(folder)
    with loading_data_only():
        assert set(reader.read_metadata().state_dict_metadata) == {"w", "n"}
        state = {"w": torch.zeros(3), "n": 0}
        torch.distributed.checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    assert state["n"] == 7
    (folder / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(UserError) as raised, loading_data_only():
        reader.read_metadata()
    assert raised.value.rule == "checkpoint-not-trusted"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, built_ops: None) -> Path:
    """A checkpoint of two ranks under ZeRO-2."""
    folder = tmp_path_factory.mktemp("saved")
    _loop(folder, "--num-processes 2 --zero-stage 2", "--save-at", "2").check()
    return folder / "project" / "checkpoints" / "checkpoint_0"


def _loop(folder: Path, plan: str, *arguments: str) -> Run:
    command = [*_ZEROFIT, "launch", "--cpu", "--no-capture", *plan.split(), _LOOP]
    return run_command([*command, "--losses", "losses.json", *arguments], folder)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("--num-processes 2 --zero-stage 2", id="resume"),
        pytest.param("--num-processes 1 --zero-stage 3", id="elastic resume", marks=pytest.mark.slow),
    ],
)
def test_no_file_of_a_checkpoint_runs_code_in_a_resume(saved: Path, tmp_path: Path, plan: str) -> None:
    checkpoint = tmp_path / "project" / "checkpoints" / "checkpoint_0"
    shutil.copytree(saved, checkpoint)
    assert _poison(checkpoint, tmp_path) >= 5
    run = _loop(tmp_path, plan, "--resume", "--skip=2")
    assert run.exit_code == 2
    assert "error[checkpoint-not-trusted]" in run.stderr
    assert not list(tmp_path.glob("ran-*"))


def test_no_file_of_a_checkpoint_runs_code_in_an_export(saved: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(saved, checkpoint)
    _poison(checkpoint, tmp_path)
    done = run_command((*_ZEROFIT, "export", str(checkpoint), "--out", "out"), tmp_path)
    assert done.exit_code == 2
    assert "error[checkpoint-not-trusted]" in done.stderr
    assert not list(tmp_path.glob("ran-*"))
    trusting = (*_ZEROFIT, "export", str(checkpoint), "--out", "out", "--trust-checkpoint")
    run_command(trusting, tmp_path)
    assert list(tmp_path.glob("ran-*"))  # the payload works


def _poison_weights(model: Path, marker: Path, **how: bool) -> None:
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save([Payload(marker), weights], model / "pytorch_model.bin", **how)


def _poison_a_shard(model: Path, marker: Path) -> None:
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(weights)
    files = {name: f"pytorch_model-0000{1 + (name == names[-1])}-of-00002.bin" for name in names}
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save({name: weights[name] for name in names[:-1]}, model / files[names[0]])
    torch.save({names[-1]: weights[names[-1]], "more": Payload(marker)}, model / files[names[-1]])


_POISONED: dict[str, tuple[Callable[[Path, Path], None], tuple[str, ...]]] = {
    "weights": (_poison_weights, ()),
    "weights of before torch 1.6": (
        lambda model, marker: _poison_weights(model, marker, _use_new_zipfile_serialization=False),
        (),
    ),
    "a shard": (_poison_a_shard, ()),
    "weights on two ranks": (_poison_weights, ("--num-processes", "2")),
    "weights under ZeRO-3": (_poison_weights, ("--num-processes", "2", "--zero-stage", "3")),
}


@pytest.mark.slow  # what loads them is asked in this process above
@pytest.mark.parametrize("kind", _POISONED)
def test_no_file_of_a_model_runs_code_in_a_generation(tmp_path: Path, built_ops: None, kind: str) -> None:
    poison, flags = _POISONED[kind]
    model = make_model(tmp_path / "model")
    poison(model, tmp_path / "ran-weights")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save(Payload(tmp_path / f"ran-{name}"), model / name)
    (tmp_path / "prompts.txt").write_text("a\n")
    words = ("--model", str(model), "--prompts", "prompts.txt", "--out", "out.jsonl")
    done = generate_run(tmp_path, *words, "--max-new-tokens", "4", *flags)
    log = (done.run_folder / "logs" / "rank0.log").read_text()
    assert done.exit_code == 2
    for said in (done.stderr, log):
        assert "error[checkpoint-not-trusted]" in said
        assert "it names posix.mkdir" in said
        assert "name a model with weights in safetensors" in said
        assert "Traceback" not in said
    assert not list(tmp_path.glob("ran-*"))
