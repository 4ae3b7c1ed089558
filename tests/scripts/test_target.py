"""True if a script or module is there to run: asked of every finder, with nothing imported."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest

from zerofit.core.errors import UserError
from zerofit.scripts.target import check_script


class _EditableFinder:
    """Stands for the finder that an editable install puts into sys.meta_path."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(self._folder)]) if name == self._name else None


@pytest.fixture
def editable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an editable install of the package zerofit_example."""
    package = tmp_path / "zerofit_example"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "train.py").touch()
    (package / "inner/deep.py").touch()
    finder = _EditableFinder("zerofit_example", tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder, object()])
    return package


@pytest.mark.parametrize("module", ["zerofit_example.train", "zerofit_example.inner.deep"])
def test_a_module_of_an_editable_install_is_found_and_not_imported(editable: Path, module: str) -> None:
    check_script(("-m", module))
    assert "zerofit_example" not in sys.modules


@pytest.mark.parametrize(
    "module", ["zerofit_example", "zerofit_example.nosuch", "zerofit_example.train.more", "sys"]
)
def test_what_python_could_not_run_is_refused(editable: Path, module: str) -> None:
    with pytest.raises(UserError) as error:
        check_script(("-m", module))
    assert (error.value.rule, error.value.found) == ("module-missing", f"-m {module}")


def test_a_package_with_a_main_module_can_be_run(editable: Path) -> None:
    (editable / "__main__.py").touch()
    check_script(("-m", "zerofit_example"))


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("train.ipynb", '{"cells": [], "metadata": {}}', "script-is-a-notebook"),
        ("train.sh", "python train.py\n", "script-is-of-a-shell"),
        ("train", "#!/usr/bin/env bash\npython train.py\n", "script-is-of-a-shell"),
    ],
)
def test_what_is_no_python_script_is_refused(tmp_path: Path, name: str, text: str, rule: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        check_script((str(tmp_path / name),))
    assert error.value.rule == rule


@pytest.mark.parametrize(
    ("line", "found", "fix"),
    [
        (
            "bash run.sh",
            "bash run.sh",
            "run.sh starts, or its launch line: `zerofit check run.sh` reads its lines",
        ),
        ("sh -x run.sh --lr 1", "sh -x run.sh --lr 1", "`zerofit check run.sh` reads its lines"),
        ("CUDA_VISIBLE_DEVICES=0,1 bash run.sh", "bash run.sh", "`zerofit check run.sh` reads its lines"),
        (
            "/usr/bin/env_bash/zsh run.sh",
            "/usr/bin/env_bash/zsh run.sh",
            "`zerofit check run.sh` reads its lines",
        ),
        ("ksh run.sh", "ksh run.sh", "`zerofit check run.sh` reads its lines"),
        ("sbatch --nodes 2 run.sh", "sbatch --nodes 2 run.sh", "`zerofit check run.sh` reads its lines"),
        ("source none.sh", "source none.sh", "name the Python script that it starts, or its launch line"),
        ("bash -c true", "bash -c true", "name the Python script that it starts, or its launch line"),
    ],
)
def test_a_shell_is_no_missing_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, found: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("python train.py\n")
    with pytest.raises(UserError) as error:
        check_script(tuple(line.split()))
    assert (error.value.rule, error.value.found) == ("script-is-of-a-shell", found)
    assert error.value.fix is not None
    assert error.value.fix.endswith(fix)


@pytest.mark.parametrize("name", ["bash", "sh", "dash.py"])
def test_a_script_may_be_called_as_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("import torch\n")
    check_script((name, "run.sh"))


def test_a_name_longer_than_any_file_s_is_that_of_no_script() -> None:
    with pytest.raises(UserError) as error:
        check_script(("a" * 400 + ".py",))
    assert error.value.rule == "script-missing"
