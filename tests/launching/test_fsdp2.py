"""FSDP2 on two CPU ranks: what a script does around its steps ends as in one process, or is refused."""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from runs import SCRIPTS, Run, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SCRIPT = str(SCRIPTS / "sharded.py")
_FSDP2 = ("--engine", "fsdp2", "--no-capture", "--mixed-precision", "no")
_LOSS, _WAY = 2e-5, 1e-3
"""Tolerances, relative: of losses, and of the distance of weights to their size (Adam's first steps are as
long for rounding as for a gradient)."""


def _train(case: str, folder: Path, *flags: str, num_ranks: int = 2) -> Run:
    folder.mkdir(exist_ok=True)
    launch = (sys.executable, "-m", "zerofit", "launch", "--cpu", "--num-processes", str(num_ranks))
    return run_command([*launch, *_FSDP2, *flags, _SCRIPT, case], folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a case trained in one process without zerofit."""

    @cache
    def train(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case)
        run_command([sys.executable, _SCRIPT, case], folder, ACCELERATE_USE_CPU="true").check()
        return folder

    return train


def _assert_same(folder: Path, expected: Path, *, names: str = "end.safetensors") -> dict[str, Any]:
    from safetensors.torch import load_file

    seen, known = (json.loads((place / "out" / "seen.json").read_text()) for place in (folder, expected))
    assert seen["losses"] == pytest.approx(known["losses"], rel=_LOSS)
    assert seen["norms"] == pytest.approx(known["norms"], rel=_LOSS)
    ours, theirs = (load_file(place / "out" / names) for place in (folder, expected))
    assert ours.keys() == theirs.keys()
    apart = {
        name: float((weight - theirs[name]).norm() / (theirs[name].norm() + 1e-12))
        for name, weight in ours.items()
    }
    assert max(apart.values()) <= _WAY, apart
    return dict(seen)


@pytest.mark.parametrize(
    ("case", "flags"),
    [
        pytest.param("window", (), marks=pytest.mark.slow),
        pytest.param("window", ("--micro-batch-size", "3"), marks=pytest.mark.slow),
        pytest.param("plain", ("--no-reshard-after-forward",), marks=pytest.mark.slow),
        pytest.param("tied", (), marks=pytest.mark.slow),
        pytest.param("adapters", (), marks=pytest.mark.slow),
        pytest.param("cleared-window", (), marks=pytest.mark.slow),
        pytest.param("clip-value", (), marks=pytest.mark.slow),
        pytest.param("torch-clip", (), marks=pytest.mark.slow),
        pytest.param("own-norm", (), marks=pytest.mark.slow),
        pytest.param("model-first", (), marks=pytest.mark.slow),
        pytest.param("optimizer-first", (), marks=pytest.mark.slow),
        pytest.param("apart", (), marks=pytest.mark.slow),
        pytest.param("plain", ("--compile",), marks=pytest.mark.slow),
        pytest.param("plain", ("--offload-param", "cpu"), marks=pytest.mark.slow),
    ],
)
def test_a_script_ends_as_in_one_process(
    case: str, flags: tuple[str, ...], alone: Callable[[str], Path], tmp_path: Path
) -> None:
    _train(case, tmp_path, *flags).check()
    _assert_same(tmp_path, alone(case))


@pytest.mark.slow
def test_weights_that_are_written_after_an_evaluation_count(
    alone: Callable[[str], Path], tmp_path: Path
) -> None:
    _train("evaluates", tmp_path).check()
    seen = _assert_same(tmp_path, alone("evaluates"))
    known = json.loads((alone("evaluates") / "out" / "seen.json").read_text())
    assert seen["more"] == pytest.approx(known["more"], rel=_LOSS)


@pytest.mark.slow
def test_ranks_generate_completions_of_other_lengths_in_step(
    alone: Callable[[str], Path], tmp_path: Path
) -> None:
    run = _train("generates", tmp_path).check()
    assert "under FSDP2 would leave ranks waiting for longer completions: synced_gpus=True" in run.stderr
    seen = _assert_same(tmp_path, alone("generates"))
    known = json.loads((alone("generates") / "out" / "seen.json").read_text())
    assert seen["more"] == known["more"]


@pytest.mark.parametrize(
    ("case", "file"),
    [
        pytest.param("saved", "model.safetensors", marks=pytest.mark.slow),
        pytest.param("save-model", "model.safetensors", marks=pytest.mark.slow),
        pytest.param("tied-save-model", "model.safetensors", marks=pytest.mark.slow),
        pytest.param("tied-saved", "model.safetensors", marks=pytest.mark.slow),
        pytest.param("adapters-saved", "adapter_model.safetensors", marks=pytest.mark.slow),
    ],
)
def test_whole_weights_are_saved(case: str, file: str, alone: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    _train(case, tmp_path).check()
    _assert_same(tmp_path, alone(case), names=f"saved/{file}")
    assert not any(".base_layer." in name for name in load_file(tmp_path / "out" / "saved" / file))


@pytest.mark.parametrize(
    ("case", "flags"),
    [
        ("plain-state", ()),
        pytest.param("plain-state", ("--state-dict-type", "full"), marks=pytest.mark.slow),
        pytest.param("plain-state", ("--compile",), marks=pytest.mark.slow),
        pytest.param("compiled-state", (), marks=pytest.mark.slow),
        pytest.param("adapters-state", (), marks=pytest.mark.slow),
        pytest.param("adapters-state", ("--state-dict-type", "full"), marks=pytest.mark.slow),
    ],
)
def test_an_export_of_a_checkpoint_has_the_weights_that_were_trained(
    case: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    _train(case, tmp_path, *flags).check()
    export = (sys.executable, "-m", "zerofit", "export", "out/checkpoint-4", "--out", "exported")
    run_command(export, tmp_path).check()
    (file,) = (tmp_path / "exported").glob("*.safetensors")
    exported, trained = load_file(file), load_file(tmp_path / "out" / "end.safetensors")
    names = {name.removeprefix("_orig_mod.").replace(".default.", "."): name for name in trained}
    assert exported.keys() == {name for name in names if case != "adapters-state" or "lora_" in name}
    assert all(weight.equal(trained[names[name]]) for name, weight in exported.items())


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        pytest.param("torch-save", "saves-shards", marks=pytest.mark.slow),
        ("unreduced-window", "gradients-not-reduced"),
        pytest.param("saved-by-one-rank", "fsdp2-saves-on-all-ranks", marks=pytest.mark.slow),
    ],
)
def test_what_can_not_be_kept_is_refused_by_name(case: str, rule: str, tmp_path: Path) -> None:
    run = _train(case, tmp_path)
    assert run.exit_code == 2, run.stderr
    assert f"error[{rule}]" in run.stderr
