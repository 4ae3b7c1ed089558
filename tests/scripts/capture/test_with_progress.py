"""What is said while a script is captured, and that its process ends with the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from captures import LOOP

from zerofit.cli.output.console import Console
from zerofit.core.errors import UserError
from zerofit.scripts.capture import capture as script
from zerofit.scripts.capture.with_progress import captured


class _Captured:
    """A captured script that notes when it is closed."""

    capture = LOOP
    left: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.is_open = True

    def __enter__(self) -> _Captured:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False
        self.left = ("/here/out was made on the way",)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Return what capture_script was asked for; its result is a captured script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told: dict[str, Any] = {"result": _Captured(), "result_is_kept": False}

    def capture_script(target: tuple[str, ...], **more: Any) -> Any:
        told.update(target=target, **more)
        if not told["result_is_kept"]:
            more["on_start"](False)
        more["on_progress"]("tokenizing 3 of 4")
        if isinstance(told["result"], UserError):
            raise told["result"]
        return told["result"]

    monkeypatch.setattr(script, "capture_script", capture_script)
    return told


def test_without_a_terminal_one_line_says_what_runs(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with captured(LOOP.target, limit_s=7, instead="leave it", observer=Console()) as run:
        assert (run.capture, asked["result"].is_open) == (LOOP, True)
        assert (
            capsys.readouterr().err == "zerofit: looking at what train.py trains, up to its first step ...\n"
        )
    assert (asked["target"], asked["limit_s"], asked["cwd"]) == (LOOP.target, 7, tmp_path)
    assert asked["instead"] == "leave it"
    assert asked["cache_folder"] == tmp_path / "cache" / "zerofit"
    assert not asked["result"].is_open
    assert capsys.readouterr().err == "zerofit: /here/out was made on the way\n"


def test_nothing_is_looked_at_where_the_cache_has_it(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked["result_is_kept"] = True
    with captured(LOOP.target, limit_s=7, instead="leave it", observer=Console()):
        assert capsys.readouterr().err == ""
        asked["on_start"](True)
        assert capsys.readouterr().err == (
            "zerofit: train.py runs again up to its first step: what it trains is known from before, and its "
            "model is needed once more ...\n"
        )


def test_the_process_ends_where_planning_fails(asked: dict[str, Any]) -> None:
    with (
        pytest.raises(RuntimeError),
        captured(LOOP.target, limit_s=7, instead="leave it", observer=Console()),
    ):
        raise RuntimeError
    assert not asked["result"].is_open


def test_a_failure_is_the_users_to_read(asked: dict[str, Any]) -> None:
    failure = UserError("capture-script-raised", "it failed", found="x", why="y", fix="z")
    asked["result"] = failure
    with (
        pytest.raises(UserError) as error,
        captured(LOOP.target, limit_s=7, instead="leave it", observer=Console()),
    ):
        pass
    assert error.value is failure
