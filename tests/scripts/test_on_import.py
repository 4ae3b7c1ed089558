"""Acting on a module right after the script has imported it."""

from __future__ import annotations

import importlib
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from zerofit.scripts.on_import import around, when_imported


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of a package `watched` that can be imported, and forget it afterwards."""
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "__init__.py").write_text("NAME = 'package'\n")
    (folder / "inner.py").write_text("NAME = 'inner'\n\n\ndef function() -> str:\n    return NAME\n")
    (folder / "other.py").write_text("from watched.inner import NAME, function\n")
    (folder / "broken.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield folder
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "watched"]:
        del sys.modules[name]


def test_acts_right_after_the_import_and_once() -> None:
    seen: list[str] = []
    when_imported("watched.inner", lambda module: seen.append(module.function()))
    assert "watched" not in sys.modules
    importlib.import_module("watched")
    assert seen == []
    importlib.import_module("watched.inner")
    importlib.import_module("watched.inner")
    assert seen == ["inner"]


def test_acts_at_once_on_what_is_imported_already() -> None:
    importlib.import_module("watched.inner")
    seen: list[ModuleType] = []
    when_imported("watched.inner", seen.append)
    assert seen == [sys.modules["watched.inner"]]


def test_whoever_imports_the_module_sees_what_takes_a_functions_place() -> None:
    def act(module: ModuleType) -> None:
        @around(module, "function")
        def function(original: Callable[[], str]) -> str:
            return f"around {original()}"

    when_imported("watched.inner", act)
    other = importlib.import_module("watched.other")
    assert (other.function(), other.function.__name__) == ("around inner", "function")


def test_every_act_on_a_module_is_done_in_order() -> None:
    seen: list[str] = []
    when_imported("watched.inner", lambda module: seen.append("first"))
    when_imported("watched.inner", lambda module: seen.append("second"))
    when_imported("watched", lambda module: seen.append("package"))
    importlib.import_module("watched.inner")
    assert sorted(seen) == ["first", "package", "second"]


def test_a_module_that_is_not_there_or_breaks_says_so_as_ever() -> None:
    seen: list[ModuleType] = []
    for name in ("watched.nowhere", "watched.broken"):
        when_imported(name, seen.append)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'watched\.nowhere'$"):
        importlib.import_module("watched.nowhere")
    with pytest.raises(RuntimeError, match=r"^at import$"):
        importlib.import_module("watched.broken")
    assert seen == []


def test_the_module_keeps_its_source_and_its_place(package: Path) -> None:
    when_imported("watched.inner", lambda module: None)
    inner = importlib.import_module("watched.inner")
    path = str(package / "inner.py")
    linecache.clearcache()
    assert inspect.getsource(inner.function) == "def function() -> str:\n    return NAME\n"
    assert (inner.__file__, inner.__spec__.origin, inner.__name__) == (path, path, "watched.inner")
    assert importlib.util.find_spec("watched.inner") is inner.__spec__


def test_a_reload_acts_again_on_the_fresh_module() -> None:
    seen: list[str] = []
    when_imported("watched.inner", lambda module: seen.append(module.NAME))
    inner = importlib.import_module("watched.inner")
    importlib.reload(inner)
    assert seen == ["inner", "inner"]
