"""explain on logs made to keep it busy: each is read in time, and launch waits for it 10 s at most."""

from __future__ import annotations

import base64
import contextlib
import io
import time
from pathlib import Path
from random import Random

import pytest

from zerofit.cli import launch
from zerofit.launching.explain import Explanation, explain_bytes
from zerofit.machine.time_limit import TimeLimitReached, time_limit

_HEAD = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n'
_DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
_DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
_BASE64 = base64.b64encode(Random(44).randbytes(45_000)).decode()
_LOGS = {
    "base64": f"{_HEAD}KeyError: <{_BASE64}>\n",
    "one word": f"{_HEAD}KeyError: '{'a1' * 32_000}'\n",
    "names of secrets": f"{_HEAD}ValueError: {'api_key' * 9_000}\n",
    "secrets": f"{_HEAD}ValueError: {'token=ab12cd34 ' * 4_000}\n",
    "URLs": f"{_HEAD}OSError: {'://a:' * 12_000}\n",
    "parts of a sign": f"{_HEAD}RuntimeError: CUDA out of memory {'Process 1 has ' * 4_500}\n",
    "prefixes": f"{_HEAD}{'[rank1]: ' * 7_000}KeyError: 1\n",
    "quotes": f"{'> ' * 30_000}KeyError: 1\n",
    "times": f"{'2024-05-01 12:00:00 ' * 3_000}Error: x\n",
    "signs": f"{_HEAD}{'!' * 60_000}Error\n",
    "levels": f"{_HEAD}{{{'level' * 12_000}\n",
    "frames": "Traceback (most recent call last):\n"
    + '  File "a.py", line 3, in f\n' * 30_000
    + "KeyError: 'x'\n",
    "chained": f"{_HEAD}KeyError: 'x'\n{_DURING}" * 3_000,
    "chained directly": f"{_HEAD}my.Odd: x\n{_DIRECT}" * 3_000,
    "escapes": "\x1b]" * 100_000 + "\n" + _HEAD + "KeyError: 1\n",
    "digits": f"{_HEAD.replace('line 3', 'line ' + '3' * 6_000)}[{'1' * 6_000}]: KeyError: 1\n",
}


def _explained(text: bytes) -> Explanation:
    return explain_bytes(io.BytesIO(text), "log")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "chained" else ()) for name in _LOGS]
)
def test_a_hostile_log_is_read_in_time(name: str) -> None:
    began = time.process_time()
    _explained(_LOGS[name].encode())
    assert time.process_time() - began < 8


def test_a_line_of_three_hundred_megabytes_is_read_in_time() -> None:
    class Line(io.RawIOBase):
        left = 300 << 20

        def read(self, size: int = -1) -> bytes:
            self.left -= size
            return b"x" * size if self.left >= 0 else b""

    began = time.process_time()
    found = explain_bytes(Line(), "log")  # type: ignore[arg-type]  # read() is all that is used
    assert (found.cause, found.num_lines) == (None, 1)
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("log", "moment"),
    [
        ("2024-05-01 12:00:03,250 x\n" + "y\n" * 150 + "KeyError: 1\n", (5, 1, 12, 0, 3, 250000)),
        ("2024-05-01 12:00:03,250 x\n" + "Error y\n" * 250 + "KeyError: 1\n", None),
        ("2024-05-01 12:00:03 x\nOSError: a\n2024-05-01 12:00:04 x\nKeyError: 1\n", (5, 1, 12, 0, 4, 0)),
        ("KeyError: 0\n2024-05-01 12:00:04 x\n", None),
    ],
)
def test_an_exception_has_the_last_time_before_it(log: str, moment: tuple[int, ...] | None) -> None:
    found = _explained(log.encode())
    logged = [found.cause, *found.others]
    column = [failure for failure in logged if failure is not None and failure.failure.id == "column-missing"]
    assert column[0].at.moment == moment


def test_launch_gives_up_looking_for_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text(f"{_HEAD}KeyError: 'x'\n{_DURING}" * 20_000)
    monkeypatch.setattr(launch, "_EXPLAIN_LIMIT_S", 0.2)
    began = time.monotonic()
    said = launch._known_cause(tmp_path)
    assert said is not None
    assert said.startswith("  cause: not found in 0.2 s; to look for it: zerofit explain ")
    assert time.monotonic() - began < 30


def _sleep_whatever_is_raised() -> None:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(10)


def _sleep_beside_another_limit() -> None:
    with time_limit(5):
        pass
    _sleep_whatever_is_raised()


def test_a_limit_ends_what_suppresses_errors_and_leaves_other_timers() -> None:
    with pytest.raises(TimeLimitReached), time_limit(0.1):
        _sleep_whatever_is_raised()
    with pytest.raises(TimeLimitReached), time_limit(0.3):
        _sleep_beside_another_limit()
