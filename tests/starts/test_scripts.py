"""Every script of benchmarks/ starts: all that it imports is there, and it takes the flags it is given."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import ROOT, documented, made, python_script, targets
from runs import run_command

_PROGRAM = Path(__file__).parents[1] / "support" / "start_scripts.py"
_FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
_MODULES = frozenset(
    {
        "benchmarks/circumstances.py",
        "benchmarks/litgpt_model.py",
        "benchmarks/mutations.py",
        "benchmarks/published_reports.py",
        "benchmarks/real_scripts_table.py",
    }
)
"""What others import, and nobody runs."""
_SCRIPTS = [
    str(path.relative_to(ROOT))
    for path in sorted(ROOT.glob("benchmarks/*.py"))
    if str(path.relative_to(ROOT)) not in _MODULES
]
_VARIABLES = ("SCRIPTS=scripts", "FOLDER=folder", "BUDGET=8m", "OUT=out", "CPU=1")
"""What a user may say to make, all at once; targets take what they know."""


def _of_make() -> list[list[str]]:
    commands = (one for target in targets() for one in made(target, *_VARIABLES))
    return [[found[0], *found[1]] for one in commands if (found := python_script(one))]


def _of_documents() -> list[list[str]]:
    return [[found[0], *found[1]] for one in documented() if (found := python_script(one))]


_STARTED = sorted(
    {tuple(words) for words in (*_of_make(), *_of_documents()) if words[0].startswith("benchmarks/")}
)
"""What make and the documents run, stopped once the flags are parsed."""
_HELPED = [(script, "--help") for script in _SCRIPTS]
_RUN = [
    ("benchmarks/published.py", "hf-bertL-adafactor-all"),
    ("benchmarks/side_by_side.py", "hf-bertL-adafactor-all"),
    ("benchmarks/published_steps.py", "bert vanilla"),
    ("benchmarks/published_fsdp_steps.py", "--out", "OUT/published_fsdp_steps.json"),
    ("benchmarks/ladder.py", "--out", "OUT/ladder.json"),
    ("benchmarks/fuzz_check.py", "--documents", "5", "--out", "OUT/fuzz_check.json"),
    ("benchmarks/bucketing.py", "--shares"),
    ("benchmarks/measure_gpu.py", "--cpu", "--out", "OUT/measured", "--dry-run"),
]
"""What is run whole: one case, or what takes little time."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each file's imports and each script ended; those that run whole are in `ran`."""
    out = tmp_path_factory.mktemp("out")
    return _ended(out, imports=_FILES, started=_STARTED, run=_HELPED)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each script that is run whole ended."""
    return _ended(tmp_path_factory.mktemp("out"), imports=[], started=[], run=_RUN)


def _ended(out: Path, *, run: Sequence[tuple[str, ...]], **others: object) -> dict[str, str]:
    asked = {**others, "run": [[word.replace("OUT", str(out)) for word in words] for words in run]}
    (out / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    command = (sys.executable, str(_PROGRAM), str(out / "asked.json"), str(out / "ended.json"))
    run_command(command, ROOT, XDG_CACHE_HOME=str(out / "cache"), PYTHONPATH=str(ROOT)).check()
    found = json.loads((out / "ended.json").read_text(encoding="utf-8"))
    return {words.replace(str(out), "OUT"): how for words, how in found.items()}


_NOT_INSTALLED = ("coverage", "cosmic_ray", "atheris")
"""Packages of the extra `mutation` and of `make fuzz-readers`, which the tests do without."""


@pytest.mark.parametrize("file", _FILES)
def test_all_that_a_file_imports_is_there(ended: dict[str, str], file: str) -> None:
    missing = {f"ModuleNotFoundError: No module named '{name}'" for name in _NOT_INSTALLED}
    assert ended[file] == "ok" or set(ended[file].split("; ")) <= missing


@pytest.mark.parametrize("words", _STARTED, ids=" ".join)
def test_a_script_takes_the_flags_that_it_is_told_to_take(
    ended: dict[str, str], words: tuple[str, ...]
) -> None:
    assert ended[" ".join(words)] == "ok"


@pytest.mark.parametrize("words", _HELPED, ids=" ".join)
def test_a_script_shows_its_flags(ended: dict[str, str], words: tuple[str, ...]) -> None:
    assert ended[" ".join(words)] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("words", _RUN, ids=" ".join)
def test_a_script_runs(ran: dict[str, str], words: tuple[str, ...]) -> None:
    assert ran[" ".join(words)] == "ok"


def test_every_script_is_started_by_make_or_by_a_document() -> None:
    assert set(_SCRIPTS) - {words[0] for words in _STARTED} == set()
