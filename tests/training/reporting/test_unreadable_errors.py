"""Exceptions of a script that can't be printed leave a record all the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest

from zerofit.core.rank_record import read_record
from zerofit.training.reporting.record import write_record
from zerofit.training.runner import _show
from zerofit.training.step.deepspeed.placeholders import sharded_weight_error
from zerofit.training.step.sharded_tensors import sharded_tensor_error


class _RaisingError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no message")


class _EndingError(ValueError):
    def __str__(self) -> str:
        sys.exit(3)


class _FalseError(RuntimeError):
    def __bool__(self) -> bool:
        return False


class _NumberError(KeyError):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # as some scripts do


_ERRORS = [
    (_RaisingError("x"), "_RaisingError", "<its message can't be made: ValueError>"),
    (_EndingError("x"), "_EndingError", "<its message can't be made: SystemExit>"),
    (_FalseError("x"), "_FalseError", "x"),
    (_NumberError("x"), "_NumberError", "<its message can't be made: TypeError>"),
    (
        RuntimeError("login with --password hunter2 failed"),
        "RuntimeError",
        "login with --password *** failed",
    ),
    (RuntimeError("bad\udcff"), "RuntimeError", "bad?"),
]


@pytest.mark.parametrize(("error", "name", "message"), _ERRORS)
def test_any_exception_has_a_record(tmp_path: Path, error: BaseException, name: str, message: str) -> None:
    write_record(tmp_path, rank=0, exit_code=1, error=error, changes=())
    record = read_record(tmp_path, 0)
    assert record is not None
    assert (record.error_type, record.error_message) == (name, message)
    assert sharded_weight_error(error) is None
    assert sharded_tensor_error(error) is None


def _hook_that_fails(*_: object) -> NoReturn:
    raise OSError("the tracker is gone")


def _hook_that_ends(*_: object) -> NoReturn:
    sys.exit(7)


@pytest.mark.parametrize(
    ("hook", "code", "said"),
    [
        (_hook_that_fails, 1, ("Error in sys.excepthook:", "the tracker is gone", "KeyError: 'lost'")),
        (_hook_that_ends, 7, ()),
        (None, 1, ("Error in sys.excepthook:", "KeyError: 'lost'")),
        (print, 1, ()),
    ],
)
def test_a_failing_hook_is_shown_as_python_shows_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hook: object,
    code: int,
    said: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "excepthook", hook)
    assert _show(KeyError("lost")) == code
    shown = capsys.readouterr().err
    assert all(part in shown for part in said)
