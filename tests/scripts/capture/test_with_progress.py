"""A script captured for a verb: what it left is told, and its process ends with the context."""

from __future__ import annotations

from typing import Any

import pytest
from captures import LOOP

from zerofit.cli.output.console import Console
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


def test_it_is_asked_for_as_the_verb_says_and_closed_with_the_context(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made, told = _Captured(), {}
    monkeypatch.setattr(script, "capture_script", lambda target, **more: told.update(more) or made)
    given: Any = {"limit_s": 7, "instead": "leave it", "retry": str, "observer": Console()}
    with captured(LOOP.target, **given) as run:
        assert (run.capture, made.is_open) == (LOOP, True)
    assert (told["limit_s"], told["cwd"], told["instead"], told["retry"]) == (7, tmp_path, "leave it", str)
    assert told["cache_folder"] == tmp_path / "cache" / "zerofit"
    assert not made.is_open
    assert capsys.readouterr().err == "zerofit: /here/out was made on the way\n"
    made.is_open = True
    with (
        pytest.raises(RuntimeError),
        captured(LOOP.target, **given),
    ):
        raise RuntimeError
    assert not made.is_open
