"""What a script imports is what Python would give it, whoever's folder zerofit was started in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerofit.core.module_path import OWN_PROGRAM, safe_path_variables

_SHOW = "import json, sys, os; print(json.dumps([sys.path, os.environ.get('PYTHONSAFEPATH')]))"
_RUN = "import sys; from zerofit.scripts.run_target import run_target; run_target(sys.argv[1:])"
_SHADOWS = (
    "secrets",
    "signal",
    "resource",
    "difflib",
    "calendar",
    "html",
    "statistics",
    "typing",
    "re",
    "copy",
)


def _python(words: list[str], place: Path, **variables: str) -> tuple[list[str], str | None]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        (sys.executable, *words), cwd=place, env={**environment, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    path, safe = json.loads(done.stdout.splitlines()[-1])
    return path, safe


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with scripts, a module and a runner that starts them as zerofit does."""
    (tmp_path / "below").mkdir()
    for file in ("show.py", "below/show.py"):
        (tmp_path / file).write_text(_SHOW)
    (tmp_path / "run.py").write_text(_RUN)
    return tmp_path


@pytest.mark.parametrize("words", [["show.py"], ["below/show.py"], ["-m", "show"], ["-m", "below.show"]])
@pytest.mark.parametrize(
    "of_user", [{}, {"PYTHONPATH": "/a:/b"}, {"PYTHONPATH": "/a", "PYTHONSAFEPATH": "1"}]
)
def test_a_script_has_the_path_that_python_gives_it(
    place: Path, words: list[str], of_user: dict[str, str]
) -> None:
    if "PYTHONSAFEPATH" in of_user and words[0] == "-m":
        of_user = {**of_user, "PYTHONPATH": str(place)}
    expected = _python(words, place, **of_user)
    own = safe_path_variables(of_user)
    under_zerofit = _python(["-c", _RUN, *words], place, **of_user, **own)
    assert under_zerofit == expected


def test_zerofits_own_programs_find_nothing_in_the_current_folder(place: Path) -> None:
    for name in (*_SHADOWS, "torch", "psutil"):
        (place / f"{name}.py").write_text("raise SystemExit('hijacked')")
    (place / "zerofit").mkdir()
    (place / "zerofit" / "__init__.py").write_text("raise SystemExit('hijacked')")
    done = subprocess.run((*OWN_PROGRAM, "zerofit", "--version"), cwd=place, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", _SHADOWS)
def test_a_module_in_the_current_folder_replaces_none_of_the_command(place: Path, name: str) -> None:
    (place / f"{name}.py").write_text(f"raise SystemExit('hijacked by {name}')")
    words = (sys.executable, "-m", "zerofit", "gpus")
    done = subprocess.run(words, cwd=place, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_start_of_python_by_zerofit_has_a_safe_path() -> None:
    """A program that is started with -m alone would find modules in the current folder."""
    package = Path(__file__).parents[2] / "zerofit"
    texts = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    starts = [
        f"{path.name}:{number}: {line.strip()}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if "sys.executable" in line and '"-m"' in line and '"-P"' not in line
    ]
    assert starts == []
