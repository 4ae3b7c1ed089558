"""Installed packages: found without an import, and refused by name before anything starts."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import zerofit
from zerofit.core.facts import Versions
from zerofit.machine.versions import probe_versions


def _install(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_versions_are_those_of_the_metadata_and_none_where_not_installed(tmp_path: Path) -> None:
    _install(tmp_path, "torch", "2.13.0+cpu")
    _install(tmp_path, "deepspeed", "0.19.8")
    assert probe_versions(search_path=[str(tmp_path)]) == Versions(
        python=platform.python_version(), zerofit=zerofit.__version__, torch="2.13.0+cpu", deepspeed="0.19.8"
    )


def test_the_first_folder_of_the_search_path_wins(tmp_path: Path) -> None:
    _install(tmp_path / "first", "torch", "2.9.0")
    _install(tmp_path / "second", "torch", "2.8.0")
    assert probe_versions(search_path=[str(tmp_path / "first"), str(tmp_path / "second")]).torch == "2.9.0"


_SCRIPT = "from pathlib import Path\nPath('ran').touch()\n"
_MODEL = ("--model", "llama-3-8b", "--seq-len", "512", "--global-batch-size", "8")
_REFUSED = (
    "error[version-unsupported]: a library is missing, or has an unsupported version\n"
    "  found: transformers 4.57.6\n"
    "  why:   zerofit supports transformers>=5.0,<6\n"
    "  fix:   pip install 'transformers>=5.0,<6'\n"
)


def _beside(folder: Path, package: str, version: str) -> dict[str, str]:
    """Return an environment in which that version of a package is found before the installed one."""
    (folder / "packages" / f"{package}-{version}.dist-info").mkdir(parents=True)
    root = str(Path(__file__).parents[2])
    return {"PYTHONPATH": os.pathsep.join((str(folder / "packages"), root))}


@pytest.mark.parametrize(
    "arguments",
    [
        ("launch", "--cpu", "train.py"),
        ("launch", "--cpu", "--dry-run", "--no-capture", "train.py"),
        ("plan", "--gpus", "1xRTX4090", "train.py"),
        ("plan", *_MODEL, "--gpus", "8xA100-80G"),
        ("config", *_MODEL, "--gpus", "8xA100-80G"),
        ("check", "--capture", "train.py"),
        ("generate", "--cpu", "--model", "model", "--prompts", "prompts.txt", "--out", "out.jsonl"),
        ("bench", "ladder", "--cpu"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_an_unsupported_library_is_refused_before_anything_starts(
    tmp_path: Path, run_zerofit: Callable[..., subprocess.CompletedProcess[str]], arguments: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "prompts.txt").write_text("hello\n")
    environment = _beside(tmp_path, "transformers", "4.57.6")
    before = set(tmp_path.iterdir())
    finished = run_zerofit(*arguments, cwd=tmp_path, environment=environment)
    assert (finished.returncode, finished.stdout, finished.stderr) == (2, "", _REFUSED)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "ds.json"),
        ("config", "--preset", "z2", "--dry-run"),
        ("plan", "--fast", *_MODEL, "--gpus", "8xA100-80G"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_verbs_that_import_no_library_work_beside_any(
    tmp_path: Path, run_zerofit: Callable[..., subprocess.CompletedProcess[str]], arguments: tuple[str, ...]
) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}'
    )
    environment = _beside(tmp_path, "transformers", "4.57.6")
    finished = run_zerofit(*arguments, cwd=tmp_path, environment=environment)
    assert finished.returncode == 0, finished.stderr


def test_a_release_newer_than_all_tested_ones_is_told_and_runs(
    tmp_path: Path, run_zerofit: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    finished = run_zerofit(
        "launch",
        "--cpu",
        "--no-capture",
        "--num-processes",
        "1",
        "--dry-run",
        "train.py",
        cwd=tmp_path,
        environment=_beside(tmp_path, "transformers", "5.99.0"),
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.splitlines()[0] == (
        "zerofit: transformers 5.99.0 is newer than 5.23.0, the newest that zerofit was tested with"
    )
