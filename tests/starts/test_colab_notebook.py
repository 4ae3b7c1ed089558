"""The notebook for Colab: its form, its commands, its script. Nobody has run it there, as it says itself."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, parse
from runs import run_process

from zerofit.checking.check_run import check

_NOTEBOOK = ROOT / "examples" / "colab.ipynb"
_DOCUMENT = json.loads(_NOTEBOOK.read_text("utf-8"))
_CELLS = _DOCUMENT["cells"]
_CODE = ["".join(cell["source"]) for cell in _CELLS if cell["cell_type"] == "code"]
_SHELL = [line.removeprefix("!") for cell in _CODE for line in cell.splitlines() if line.startswith("!")]
_SCRIPT = next(cell for cell in _CODE if cell.startswith("%%writefile train.py\n")).partition("\n")[2]
_OF_COLAB = ("nvidia-smi", "git clone")
"""How commands begin that are not zerofit's."""


def test_it_is_a_notebook_of_format_4_5_without_output() -> None:
    assert (_DOCUMENT["nbformat"], _DOCUMENT["nbformat_minor"]) == (4, 5)
    assert _DOCUMENT["metadata"]["accelerator"] == "GPU"
    keys = {
        "code": {"id", "metadata", "source", "execution_count", "outputs"},
        "markdown": {"id", "metadata"},
    }
    for cell in _CELLS:
        assert set(cell) - {"cell_type"} == keys[cell["cell_type"]] | {"source"}
        assert (cell.get("outputs") or None, cell.get("execution_count")) == (None, None)
        assert all(line.endswith("\n") for line in cell["source"][:-1])
    assert len({cell["id"] for cell in _CELLS}) == len(_CELLS)


def test_it_says_that_nobody_has_run_it_there() -> None:
    assert "**Untried:** nobody has run this notebook on Colab yet." in "".join(_CELLS[0]["source"])


def test_its_commands_are_zerofits_or_colabs() -> None:
    verbs = []
    for line in _SHELL:
        if line.startswith("zerofit "):
            verbs.append(line.split()[1])
            parse(shlex.split(line)[1:])
    assert verbs == ["doctor", "plan", "launch", "runs"]
    assert [line for line in _SHELL if not line.startswith(("zerofit ", *_OF_COLAB))] == []


def test_its_cells_of_python_parse_and_check_finds_no_mistake() -> None:
    for cell in _CODE:
        ast.parse("\n".join(line for line in cell.splitlines() if not line.startswith(("!", "%"))))
    assert check(_NOTEBOOK).findings == ()


def test_its_script_and_cells_are_linted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT + "\n")
    files = (str(_NOTEBOOK), str(tmp_path / "train.py"))
    for words in (("check",), ("format", "--check")):
        command = (sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), *files)
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("page", ["docs/index.md", "docs/tutorial.md", "docs/notebooks.md"])
def test_pages_that_link_it_say_that_it_is_untried(page: str) -> None:
    text = " ".join((ROOT / page).read_text("utf-8").split())
    assert re.search(r"\(\.\./examples/colab\.ipynb\)[^.]*untried", text)


@pytest.mark.slow
def test_its_script_trains_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    small = ("--steps", "5", "--layers", "1", "--length", "16", "--batch", "4")
    launch = (sys.executable, "-m", "zerofit", "launch", "--cpu", "--num-processes", "1", "train.py", *small)
    assert "step 5: loss " in run_process(launch, tmp_path).check().stdout
    assert list((tmp_path / "trained").glob("*.safetensors"))
