"""The mutation run: what it changes, what it leaves alone, and what becomes of mutants in a toy package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutation_run.coverage_map import Choice, CoverageMap, make_map
from mutation_run.mutants import Mutant, draw_mutants, find_again, mutated, spans_apart
from mutation_run.trials import Verdict, list_tests, run_trials

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


@pytest.mark.slow
def test_a_mutant_is_killed_by_the_first_test_that_fails_or_survives_them_all(toy: Path) -> None:
    tests = list_tests(toy)
    assert tests == [f"tests/test_sizes.py::test_{name}" for name in ("limit", "doubled", "ends")]
    all_tests = Choice(files=(tuple(tests),), num_seeing=3, num_cut=0)
    half = Choice(files=(tuple(tests[:1]),), num_seeing=3, num_cut=2)
    unseen = Choice(files=(), num_seeing=0, num_cut=0)
    jobs = [(_KILLED, all_tests), (_SURVIVES, all_tests), (_SURVIVES, half), (_SURVIVES, unseen)]
    trials = [trial for _, trial in run_trials([toy], jobs, budget_s=5, libraries=())]
    assert [(one.verdict, one.killed_by, one.num_tried, one.num_cut) for one in trials] == [
        (Verdict.KILLED, tests[1], 2, 0),
        (Verdict.SURVIVED, None, 3, 0),
        (Verdict.CUT_OFF, None, 1, 2),
        (Verdict.UNSEEN, None, 0, 0),
    ]
    assert (toy / _FILE).read_text() == _CODE


@pytest.mark.slow
def test_a_test_that_fails_without_the_mutant_kills_none(toy: Path) -> None:
    (toy / "tests/test_sizes.py").write_text(_TESTS + "\n\ndef test_broken():\n    assert False\n")
    order = [f"tests/test_sizes.py::test_{name}" for name in ("broken", "doubled")]
    choice = Choice(files=(tuple(order),), num_seeing=2, num_cut=0)
    trials = dict(run_trials([toy], [(_KILLED, choice), (_SURVIVES, choice)], budget_s=5, libraries=()))
    assert trials[_KILLED].killed_by == order[1]
    assert trials[_SURVIVES].verdict is Verdict.SURVIVED


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


def test_the_whole_way_from_a_map_to_a_score(toy: Path, tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="pip install zerofit[mutation]")
    make_map(toy, tmp_path / "map", ["-p", "no:cacheprovider"])
    drawn = draw_mutants(toy, "zerofit", count=100, seed=16)
    assert drawn == draw_mutants(toy, "zerofit", count=100, seed=16)
    assert {mutant.before for mutant in drawn} >= {_KILLED.before, _SURVIVES.before}
    known = CoverageMap(folder=tmp_path / "map", tests=frozenset(list_tests(toy)))
    choice = known.choose(_KILLED, toy, budget_s=60)
    assert choice.files[0][0] == "tests/test_sizes.py::test_doubled"
    assert (choice.num_seeing, choice.num_cut) == (1, 0)
    assert known.choose(_KILLED, toy, budget_s=0) == Choice(files=(), num_seeing=1, num_cut=1)
    (toy / "tests/test_sizes.py").write_text(_TESTS + "\n\ndef test_new():\n    assert doubled(4) == 8\n")
    later = CoverageMap(folder=tmp_path / "map", tests=frozenset(list_tests(toy)))
    new = [f"tests/test_sizes.py::test_{name}" for name in ("new", "doubled")]
    assert later.choose(_KILLED, toy, budget_s=60).files[0][:2] == tuple(new)
