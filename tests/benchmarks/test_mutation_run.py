"""The mutation run: what it changes, what it leaves alone, and what becomes of mutants in a toy package."""

from __future__ import annotations

import ast
import builtins
import importlib
import runpy
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import mutation_score
import pytest
from mutation_run.coverage_map import Choice, CoverageMap, FileTests, read_at
from mutation_run.forked_tests import list_tests
from mutation_run.map_run import is_made, make_map
from mutation_run.marks import mark, read_hits
from mutation_run.mutants import Mutant, draw_mutants, find_again, mutated, spans_apart
from mutation_run.results import Run, Trial, Verdict, append_trial, read_run, read_trials, summary, survivors
from mutation_run.trials import run_trials

_CODE = """\
LIMIT = 3


def is_above(size: int | None) -> bool:
    return (size or 0) > LIMIT


def doubled(size):
    return size * 2


def endless(size):
    while size > 0:
        size -= 1
    return size
"""
_TESTS = """\
from zerofit.sizes import doubled, endless, is_above


def test_limit():
    assert is_above(9)


def test_doubled():
    assert doubled(3) == 6


def test_ends():
    assert endless(2) == 0
"""
_FILE = "zerofit/sizes.py"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A tree with a package of one module, and its tests."""
    tree = tmp_path / "toy"
    for name, text in {_FILE: _CODE, "zerofit/__init__.py": "", "tests/test_sizes.py": _TESTS}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    (tree / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')
    return tree


def _mutant(before: str, after: str) -> Mutant:
    line = _CODE.splitlines().index(before) + 1
    return Mutant(file=_FILE, line=line, operator="by hand", definition=None, before=before, after=after)


_KILLED = _mutant("    return size * 2", "    return size + 2")
_SURVIVES = _mutant("LIMIT = 3", "LIMIT = 4")


def _choice(*tests: str, num_seeing: int = 3, num_cut: int = 0) -> Choice:
    files = (FileTests(tests=tests, most_s=1.0),) if tests else ()
    return Choice(files=files, num_seeing=num_seeing, num_cut=num_cut)


@pytest.mark.slow
def test_a_mutant_is_killed_by_the_first_test_that_fails_or_survives_them_all(toy: Path) -> None:
    tests = list_tests(toy)
    assert tests == [f"tests/test_sizes.py::test_{name}" for name in ("limit", "doubled", "ends")]
    jobs = [
        (_KILLED, _choice(*tests)),
        (_SURVIVES, _choice(*tests)),
        (_SURVIVES, _choice(tests[0], num_cut=2)),
        (_SURVIVES, _choice(num_seeing=0)),
    ]
    trials = [trial for _, trial in run_trials([toy], jobs, libraries=())]
    assert [(trial.verdict, trial.killed_by, trial.tests, trial.num_tried) for trial in trials] == [
        (Verdict.KILLED, tests[1], (), 2),
        (Verdict.SURVIVED, None, tuple(tests), 3),
        (Verdict.CUT_OFF, None, (tests[0],), 1),
        (Verdict.UNSEEN, None, (), 0),
    ]
    assert [trial.num_cut for trial in trials] == [0, 0, 2, 0]
    assert (toy / _FILE).read_text() == _CODE


@pytest.mark.slow
def test_a_test_that_fails_without_the_mutant_kills_none(toy: Path) -> None:
    (toy / "tests/test_sizes.py").write_text(_TESTS + "\n\ndef test_broken():\n    assert False\n")
    order = [f"tests/test_sizes.py::test_{name}" for name in ("broken", "doubled")]
    jobs = [(_KILLED, _choice(*order)), (_SURVIVES, _choice(*order))]
    trials = dict(run_trials([toy], jobs, libraries=()))
    assert trials[0].killed_by == order[1]
    assert (trials[1].verdict, trials[1].tests) == (Verdict.SURVIVED, (order[1],))


_SERVER = """\
import os, socket, sys

from zerofit.sizes import doubled


def main(address):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    client, _ = listener.accept()
    client.sendall(f"{doubled(3)} {os.getppid()}".encode())
"""
_PROGRAMS = """\
import os, socket, subprocess, sys, time
from pathlib import Path


def ask(address):
    server = subprocess.Popen([sys.executable, str(Path(__file__).with_name("fork_server.py")), address])
    for _ in range(500):
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(address)
            return client.recv(100).decode().split()
        except OSError:
            assert server.poll() is None
            time.sleep(0.01)
"""
_ASKING = """\
import os, tempfile

import forked_programs


def test_a_fork_of_this_process_serves():
    assert forked_programs.ask(tempfile.mktemp()) == ["6", str(os.getpid())]
"""


@pytest.mark.slow
def test_the_tests_fork_server_is_a_fork_too_and_has_the_mutant(toy: Path) -> None:
    support = toy / "tests/support"
    support.mkdir()
    (support / "fork_server.py").write_text(_SERVER)
    (support / "forked_programs.py").write_text(_PROGRAMS)
    (toy / "tests/test_sizes.py").write_text(_ASKING)
    settings = '[tool.pytest.ini_options]\ntestpaths = ["tests"]\npythonpath = ["tests/support"]\n'
    (toy / "pyproject.toml").write_text(settings)
    (test,) = list_tests(toy)
    jobs = [(_SURVIVES, _choice(test)), (_KILLED, _choice(test))]
    trials = dict(run_trials([toy], jobs, libraries=()))
    assert [trials[number].verdict for number in (0, 1)] == [Verdict.SURVIVED, Verdict.KILLED]


@pytest.mark.slow
def test_no_trial_begins_once_the_time_is_up(toy: Path) -> None:
    jobs = [(_SURVIVES, _choice("tests/test_sizes.py::test_limit"))]
    assert list(run_trials([toy], jobs, until=time.monotonic(), libraries=())) == []


def test_verdicts_are_appended_and_a_line_that_was_broken_off_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    assert read_trials(file) == {}
    killed = Trial(verdict=Verdict.KILLED, killed_by="tests/test_sizes.py::test_doubled", num_tried=2)
    alive = Trial(verdict=Verdict.SURVIVED, tests=("tests/test_sizes.py::test_limit",), seconds=2.5)
    append_trial(file, _KILLED, killed)
    append_trial(file, _SURVIVES, alive)
    whole = file.read_text()
    file.write_text(whole[:-9])
    assert read_trials(file) == {_KILLED: killed}
    append_trial(file, _SURVIVES, alive)
    assert file.read_text() == whole
    assert read_trials(file) == {_KILLED: killed, _SURVIVES: alive}


def test_a_run_in_tables() -> None:
    missed = _mutant("        size -= 1", "        size -= 2")
    gone = _mutant("    while size > 0:", "    while size > 1:")
    run = Run(
        revision="c0ffee",
        budget_s=40,
        drawn={"zerofit/sizes": [_KILLED, _SURVIVES], "zerofit/sizes, 2 more": [missed, gone]},
        extra=("zerofit/sizes, 2 more",),
    )
    tests = ("tests/a.py::test_a", "tests/a.py::test_b[1]", "tests/b.py::test_c")
    trials = {
        _KILLED: Trial(verdict=Verdict.TIMED_OUT),
        _SURVIVES: Trial(verdict=Verdict.CUT_OFF, tests=tests, num_seeing=4, num_cut=2, seconds=40.1),
        gone: Trial(verdict=Verdict.GONE),
    }
    assert summary(run, trials).splitlines() == [
        "part                        killed  timed out   survived    cut off     unseen       gone"
        "  not tried  killed, %",
        "zerofit/sizes                    0          1          0          1          0          0"
        "          0       50.0",
        "all                              0          1          0          1          0          0"
        "          0       50.0",
        "zerofit/sizes, 2 more            0          0          0          0          0          1"
        "          1          -",
    ]
    assert survivors(run, trials).splitlines() == [
        "zerofit/sizes.py:1 (zerofit/sizes, by hand): cut off",
        "  - LIMIT = 3",
        "  + LIMIT = 4",
        "  3 tests ran in 40 s; 2 more that execute the line were not tried",
        "    tests/a.py: test_a, test_b[1]",
        "    tests/b.py: test_c",
    ]


def test_a_mutant_is_found_again_where_its_line_has_moved(toy: Path) -> None:
    (toy / _FILE).write_text("# moved\n" + _CODE)
    moved = find_again(_KILLED, toy)
    assert moved is not None
    assert moved.line == _KILLED.line + 1
    assert mutated(moved, (toy / _FILE).read_text()) == "# moved\n" + _CODE.replace("size * 2", "size + 2")
    (toy / _FILE).write_text("")
    assert find_again(_KILLED, toy) is None
    with pytest.raises(ValueError, match="does not read"):
        mutated(_KILLED, "\n" * 20)


def test_a_mutant_is_found_again_in_the_file_that_its_definition_went_to(toy: Path) -> None:
    mutant = replace(_KILLED, definition="doubled")
    (toy / _FILE).write_text("")
    method = "class Sizes:\n    def doubled(self, size):\n        return size * 2\n"
    (toy / "zerofit/moved.py").write_text(method)
    moved = find_again(mutant, toy)
    assert moved is not None
    assert (moved.file, moved.line) == ("zerofit/moved.py", 3)
    assert mutated(moved, method) == method.replace("size * 2", "size + 2")
    (toy / "zerofit/twice.py").write_text(method)
    assert find_again(mutant, toy) is None
    (toy / "zerofit/twice.py").write_text(method.replace("doubled", "trebled"))
    assert find_again(mutant, toy) == moved


@pytest.mark.parametrize(
    ("source", "apart"),
    [
        ("def f(a: int | None = 3) -> int | str: ...", ["int | None", "int | str"]),
        ("@dataclass(frozen=True)\nclass A:\n    size: int = 3\n", ["dataclass(frozen=True)", "int"]),
        ("x = f'{size + 1} bytes' + str(size - 1)", ["f'{size + 1} bytes'"]),
        ("if TYPE_CHECKING:\n    import a", ["if TYPE_CHECKING:\n    import a"]),
        ("Span = tuple[int | str, int]", ["Span = tuple[int | str, int]"]),
        ("RULES = (Rule(bad=Example(stage=3), least=2),)", ["Example(stage=3)"]),
    ],
)
def test_annotations_decorators_texts_and_examples_are_left_alone(source: str, apart: list[str]) -> None:
    lines = source.splitlines(keepends=True)

    def place(at: tuple[int, int]) -> int:
        return sum(map(len, lines[: at[0] - 1])) + at[1]

    found = {source[place(start) : place(end)] for start, end in spans_apart(ast.parse(source))}
    assert found == set(apart)


_FORKS = """\
import os

from zerofit.sizes import doubled


def test_forks():
    if os.fork() == 0:
        doubled(1)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_a_map_is_made_in_groups_and_has_what_forks_ran(toy: Path, tmp_path: Path) -> None:
    (toy / "tests/test_forks.py").write_text(_FORKS)
    folder = tmp_path / "map"
    arguments = ["-p", "no:cacheprovider"]
    lines = read_at(toy, _KILLED)
    marked = tmp_path / "marked"
    shutil.copytree(toy, marked)
    assert not make_map(marked, folder, lines, arguments, until=time.monotonic(), files_of_group=1)
    assert not is_made(folder)
    assert make_map(marked, folder, lines, arguments, files_of_group=1)
    first, second = sorted(folder.glob("group0*"))
    before = first.stat().st_mtime_ns
    shutil.rmtree(second)
    (folder / "map.json").unlink()
    assert make_map(marked, folder, lines, arguments, files_of_group=1)
    assert first.stat().st_mtime_ns == before
    known = CoverageMap(folder=folder, tests=frozenset(list_tests(toy)))
    forks, doubled = "tests/test_forks.py::test_forks", "tests/test_sizes.py::test_doubled"
    choice = known.choose(_KILLED, toy, budget_s=60)
    assert {file.tests[0] for file in choice.files} == {forks, doubled}
    assert (choice.num_seeing, choice.num_cut) == (2, 0)
    in_no_time = known.choose(_KILLED, toy, budget_s=0)
    assert [len(file.tests) for file in in_no_time.files] == [1]
    assert (in_no_time.num_seeing, in_no_time.num_cut) == (2, 1)
    (toy / "tests/test_sizes.py").write_text(_TESTS + "\n\ndef test_new():\n    assert doubled(4) == 8\n")
    later = CoverageMap(folder=folder, tests=frozenset(list_tests(toy)))
    new = "tests/test_sizes.py::test_new"
    assert later.choose(_KILLED, toy, budget_s=60).files[0].tests[:2] == (new, doubled)
    first_killer = later.choose(_KILLED, toy, budget_s=60).killer_first(forks, later.tests).files[0]
    assert first_killer.tests == (forks,)


_BODIES = """\
def ran(size, names, file=None):
    if (
        size > 1
        and size < 5
    ):
        size += 1
    elif size == 9:
        return "ü" + str(size)
    for name in names, size:
        while (size := size - 1) > 0: pass
    with open(__file__) as file: text = file.read()
    match size, names:
        case 0, _:
            pass
    try:
        @staticmethod
        def inner(a=3): return a
        return inner(2), len(text) > 3
    except ValueError as error:
        raise TypeError from error
"""


def test_marked_statements_run_as_before_and_no_line_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where a map is being made, this process's own marks go on afterwards.
    monkeypatch.setattr(builtins, "_zerofit_hit", None, raising=False)
    package = tmp_path / "marked_package"
    package.mkdir()
    (package / "__init__.py").write_text('"""Text."""\nfrom __future__ import annotations\nNAME = 1\n')
    (package / "bodies.py").write_text(_BODIES)
    lines = [("marked_package/bodies.py", line) for line in range(2, len(_BODIES.splitlines()) + 1)]
    mark(tmp_path, lines, package="marked_package", folder=tmp_path)
    assert (package / "__init__.py").read_text().splitlines()[2] == "import marked_package._marks; NAME = 1"
    marked = (package / "bodies.py").read_text()
    assert len(marked.splitlines()) == len(_BODIES.splitlines())
    monkeypatch.syspath_prepend(tmp_path)
    bodies = importlib.import_module("marked_package.bodies")
    assert bodies.ran(3, []) == (2, True)
    assert runpy.run_path(str(package / "bodies.py"))["ran"](9, []) == "ü9"
    seen = read_hits(tmp_path)["marked_package/bodies.py"]
    assert [line for line, tests in seen.items() if not tests] == [14, 20]  # case 0, and the handler's
    assert {test.rpartition("::")[2] for tests in seen.values() for test in tests} == {
        "test_marked_statements_run_as_before_and_no_line_moves"
    }


def test_mutants_are_drawn_by_a_seed_and_none_twice(toy: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="pip install zerofit[mutation]")
    drawn = draw_mutants(toy, "zerofit", count=100, seed=16)
    assert drawn == draw_mutants(toy, "zerofit", count=100, seed=16)
    assert {mutant.before for mutant in drawn} >= {_KILLED.before, _SURVIVES.before}
    assert not set(draw_mutants(toy, "zerofit", count=3, seed=17, but=drawn)) & set(drawn)


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_broken_off_on_the_commit_it_began_with(toy: Path, tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="pip install zerofit[mutation]")

    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-C", str(toy), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True
        )

    def start(*more: str) -> str:
        options = ("--tree", str(toy), "--jobs", "1", "--parts", "zerofit:2:16", *more)
        command = [sys.executable, mutation_score.__file__, str(tmp_path / "run"), *options]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return told[told.index("part") :]  # what libraries print comes before

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "toy")
    assert start("--minutes", "0") == "part of the map is missing: the same command goes on\n"
    revision = read_run(tmp_path / "run" / "run.json").revision
    (toy / _FILE).write_text("# moved\n" + _CODE)
    git("commit", "-q", "-a", "-m", "moved")
    whole = start()
    file = tmp_path / "run" / "trials.jsonl"
    first, _ = file.read_text().splitlines(keepends=True)
    file.write_text(first)
    assert start("--minutes", "0").endswith("The time is up, 1 mutants are left: the same command goes on\n")
    assert file.read_text() == first
    assert start() == whole
    assert read_run(tmp_path / "run" / "run.json").revision == revision
