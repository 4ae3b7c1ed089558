"""The pre-commit hook, the action and the forms for issues say what is there, and find what they should."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT

_BAD = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "offload_params": {"device": "cpu"}},
}
_WITHOUT = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refusing())
from zerofit.cli.main import main
main()
"""


def _yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def _hook() -> dict[str, Any]:
    (hook,) = _yaml(".pre-commit-hooks.yaml")
    return dict(hook)


def _steps() -> list[dict[str, Any]]:
    return list(_yaml("action.yml")["runs"]["steps"])


def test_the_hook_has_what_pre_commit_asks_for() -> None:
    assert {"id", "name", "entry", "language", "files"} <= set(_hook())
    assert _hook()["language"] == "system"


@pytest.mark.parametrize(
    ("path", "is_checked"),
    [
        ("ds_config.json", True),
        ("configs/deepspeed_zero3.json", True),
        ("configs/zero-2.yaml", True),
        ("accelerate.yml", True),
        ("training/fsdp_config.yaml", True),
        ("jobs/train.sbatch", True),
        ("package.json", False),
        ("fsdp/notes.md", False),
        ("zeros.json", False),
        ("deepspeed/README.yaml.txt", False),
    ],
)
def test_the_hook_takes_files_by_their_usual_names(path: str, is_checked: bool) -> None:
    assert bool(re.search(_hook()["files"], path)) == is_checked


def test_the_hook_fails_for_a_file_that_deepspeed_refuses(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(_BAD))
    command = [sys.executable, "-m", *shlex.split(_hook()["entry"]), "ds_config.json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, "fix:   write offload_param" in ended.stdout) == (1, True), ended.stderr


def test_the_action_installs_all_that_check_imports(tmp_path: Path) -> None:
    (install,) = [step["run"] for step in _steps() if "pip" in step.get("run", "")]
    installed = set(install.splitlines()[-1].partition("--quiet ")[2].split())
    needed = tuple(line.partition(">")[0] for line in _dependencies())
    refused = {name.replace("-", "_") for name in needed if name not in installed}
    assert len(refused) == len(needed) - len(installed)
    (tmp_path / "ds_config.json").write_text(json.dumps(_BAD))
    (tmp_path / "train.py").write_text(
        "from transformers import TrainingArguments\nTrainingArguments('out')\n"
    )
    line = (
        "accelerate launch --num_processes 2 --use_deepspeed --deepspeed_config_file ds_config.json train.py"
    )
    command = [sys.executable, "-c", _WITHOUT.format(refused=refused), "check", *line.split()]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, "error[deepspeed-key-rejected]" in ended.stdout) == (1, True), ended.stderr


def _dependencies() -> list[str]:
    import tomllib

    return list(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    )


def test_the_action_passes_its_inputs_by_the_environment() -> None:
    """An expression in the text of a command would be run as code."""
    inputs = set(_yaml("action.yml")["inputs"])
    passed = {value for step in _steps() for value in step.get("env", {}).values()}
    assert passed == {f"${{{{ inputs.{name} }}}}" for name in inputs}
    assert not any("${{" in step.get("run", "") for step in _steps())


@pytest.mark.parametrize("name", ["measurement.yml", "missing.yml", "wrong-answer.yml"])
def test_a_form_has_what_is_asked_for(name: str) -> None:
    form = _yaml(f".github/ISSUE_TEMPLATE/{name}")
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "dropdown", "checkboxes", "markdown")
        assert field["attributes"]["label"]
