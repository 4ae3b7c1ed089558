"""The runner runs a script as Python itself does, and leaves a record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import PLAN

from zerofit.core.plan import Topology, plan_to_json

_PLAN = plan_to_json(replace(PLAN, topology=Topology(world_size=2, on_cpu=True)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a plan in run/, a script's folder and a package."""
    files = {
        "run/plan.json": _PLAN,
        "scripts/helper.py": "def fail():\n    raise KeyError('helper')\n",
        "package/__init__.py": "",
        "package/train.py": (
            "import sys\n"
            "print(sys.argv, sys.path[0], __name__, __file__, __spec__.name, __package__)\n"
            "raise ValueError('x')\n"
        ),
        "package/__main__.py": "print(__name__, __package__)\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _python(
    folder: Path, *arguments: str, rank: int | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environ = {name: text for name, text in os.environ.items() if name != "RANK"}
    if rank is not None:
        environ["RANK"] = str(rank)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _runner(folder: Path, *target: str, rank: int | None = None) -> subprocess.CompletedProcess[str]:
    return _python(folder, "-m", "zerofit.training.runner", "run/plan.json", *target, rank=rank)


def _record(folder: Path, rank: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / f"run/ranks/rank{rank}.json").read_text())
    return document


def _script(folder: Path, text: str) -> str:
    (folder / "scripts/train.py").write_text(text)
    return "scripts/train.py"


_SCRIPTS = {
    "arguments": "import sys\nprint(sys.argv, sys.path[0], __name__, __spec__)",
    "main is this module": "import sys\nprint(vars(sys.modules['__main__']) is globals(), __doc__)",
    "helper": "import helper\nhelper.fail()",
    "exception": "def deep():\n    raise ValueError('x')\n\ndeep()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise RuntimeError('b') from error",
    "syntax error": "x = 1\ndef f(:\n",
    "base exception": "class Stop(BaseException): pass\nraise Stop('b')",
    "own excepthook": (
        "import sys\nsys.excepthook = lambda kind, *_: print('hook', kind, file=sys.stderr)\n1 / 0"
    ),
    "exit None": "import sys\nprint('x')\nsys.exit()",
    "exit 7": "import sys\nsys.exit(7)",
    "exit text": "import sys\nsys.exit('text')",
    "os._exit": "import os\nprint('x', flush=True)\nos._exit(3)",
    "killed": "import os\nprint('x', flush=True)\nos.kill(os.getpid(), 9)",
    "at exit": "import atexit\natexit.register(print, 'bye')\nprint('x')",
    "thread": (
        "import threading, time\nX = 5\ndef run():\n    time.sleep(0.2)\n    print(X)\n"
        "threading.Thread(target=run).start()"
    ),
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "source": "import inspect\ndef f(): pass\nprint(inspect.getsource(f), inspect.getmodule(f).__name__)",
    "spawned workers": (
        "import multiprocessing\ndef double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))"
    ),
}


_LIKE_ANOTHER = (
    *("helper", "chained", "syntax error", "base exception", "exit None", "exit 7", "os._exit"),
    *("main is this module", "source", "pickle", "spawned workers", "exit text"),
)
"""Slow cases, which Python ends or names as it does others."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in _LIKE_ANOTHER else ()) for name in _SCRIPTS],
)
def test_a_script_runs_as_python_runs_it(folder: Path, name: str) -> None:
    script = _script(folder, _SCRIPTS[name])
    plain = _python(folder, script, "--epochs", "3")
    ours = _runner(folder, script, "--epochs", "3")
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_a_module_runs_as_python_runs_it(folder: Path) -> None:
    plain = _python(folder, "-m", "package.train", "--epochs", "3")
    ours = _runner(folder, "-m", "package.train", "--epochs", "3")
    assert (ours.returncode, ours.stdout) == (1, plain.stdout)
    # Python's own traceback begins with two lines of runpy.
    assert ours.stderr.splitlines()[1:] == plain.stderr.splitlines()[3:]


def test_a_package_runs_by_its_main(folder: Path) -> None:
    assert _runner(folder, "-m", "package").stdout == "__main__ package\n"


@pytest.mark.parametrize(
    ("text", "exit_code", "error_type", "error_message"),
    [
        ("print('x')", 0, None, None),
        pytest.param("import sys\nsys.exit(7)", 7, "SystemExit", "7", marks=pytest.mark.slow),
        pytest.param("import sys\nsys.exit('text')", 1, "SystemExit", "text", marks=pytest.mark.slow),
        ("try:\n    raise MemoryError('full')\nexcept MemoryError:\n    exit(3)", 3, "MemoryError", "full"),
        pytest.param(
            "try:\n    {}['a']\nexcept KeyError:\n    exit(3)", 3, "SystemExit", "3", marks=pytest.mark.slow
        ),
        ("raise ValueError('bad value')", 1, "ValueError", "bad value"),
        pytest.param("raise KeyboardInterrupt", 130, "KeyboardInterrupt", "", marks=pytest.mark.slow),
        ("def f(:", 1, "SyntaxError", None),
    ],
)
def test_record_of_an_end(
    folder: Path, text: str, exit_code: int, error_type: str | None, error_message: str | None
) -> None:
    finished = _runner(folder, _script(folder, text))
    record = _record(folder)
    assert (finished.returncode, record["exit_code"]) == (exit_code, exit_code)
    assert record["error_type"] == error_type
    if error_type != "SyntaxError":  # its text differs between versions of Python
        assert record["error_message"] == error_message
    assert record["peak_host_bytes"] > 10**6
    assert (record["rank"], record["changes"], record["peak_gpu_allocated_bytes"]) == (0, [], None)


@pytest.mark.parametrize(
    "text",
    ["import os\nos._exit(3)", pytest.param("import os\nos.kill(os.getpid(), 9)", marks=pytest.mark.slow)],
)
def test_a_rank_that_ends_without_its_own_doing_leaves_no_record(folder: Path, text: str) -> None:
    _runner(folder, _script(folder, text))
    assert not list((folder / "run/ranks").glob("*.json"))


def test_each_rank_has_its_own_record_and_log(folder: Path) -> None:
    script = _script(
        folder, "import os, sys\nprint('rank', os.environ['RANK'])\nsys.exit(int(os.environ['RANK']))"
    )
    for rank in (0, 1):
        assert _runner(folder, script, rank=rank).returncode == rank
        assert (folder / f"run/logs/rank{rank}.log").read_text() == f"rank {rank}\n"
        assert _record(folder, rank)["exit_code"] == rank


def test_a_broken_plan_is_a_message_and_not_a_traceback(folder: Path) -> None:
    (folder / "run/plan.json").write_text(_PLAN[:38])
    finished = _runner(folder, _script(folder, "print('x')"))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr == (
        "error[plan-file-broken]: the plan file can't be read\n"
        "  found: Unterminated string starting at: line 3 column 15 (char 32)   (run/plan.json)\n"
        "  why:   it is incomplete JSON, as after an interrupted write\n"
        "  fix:   write the plan again, or leave out --plan\n"
    )
    assert _record(folder)["error_type"] == "UserError"


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [
        pytest.param("", 0, marks=pytest.mark.slow),
        pytest.param("raise SystemExit(7)", 7, marks=pytest.mark.slow),
        ("raise ValueError('x')", 1),
    ],
)
def test_a_record_that_cannot_be_written_changes_nothing(folder: Path, text: str, exit_code: int) -> None:
    (folder / "run/ranks").touch()
    finished = _runner(folder, _script(folder, text))
    assert finished.returncode == exit_code
    assert finished.stderr.splitlines()[-1] == (
        "zerofit: the record of rank 0 can't be written: [Errno 17] File exists: 'run/ranks'"
    )


def test_a_runner_that_fails_before_the_script_does_not_end_well(folder: Path) -> None:
    (folder / "run/logs").touch()  # where the folder of the logs should stand
    finished = _runner(folder, _script(folder, "print('x')"))
    assert (finished.returncode, finished.stdout) == (1, "")


def test_an_abort_while_the_interpreter_is_torn_down_does_not_undo_a_good_end(folder: Path) -> None:
    script = (
        "import atexit, os, sys, threading, time\n"
        "class Torn:\n"
        "    def __del__(self, abort=os.abort):\n"
        "        abort()\n"
        "sys.torn = Torn()\n"
        "atexit.register(print, 'the handler of the script')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('a thread of the script'))).start()\n"
    )
    (folder / "scripts" / "torn.py").write_text(script)
    assert _python(folder, "scripts/torn.py").returncode == -signal.SIGABRT
    finished = _python(folder, "-m", "zerofit.training.runner", "run/plan.json", "scripts/torn.py")
    assert finished.returncode == 0
    assert finished.stdout == "a thread of the script\nthe handler of the script\n"


def test_a_forked_child_ends_with_its_own_exit_code(folder: Path) -> None:
    script = (
        "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    (folder / "scripts" / "fork.py").write_text(script)
    finished = _python(folder, "-m", "zerofit.training.runner", "run/plan.json", "scripts/fork.py")
    assert (finished.returncode, finished.stdout) == (0, "5\n")


def test_the_runner_imports_nothing_slow_by_itself(folder: Path) -> None:
    slow = ["torch", "transformers", "accelerate", "deepspeed"]
    finished = _runner(folder, _script(folder, f"import sys\nprint([n for n in {slow} if n in sys.modules])"))
    assert finished.stdout == "[]\n"


_WAIT = "\nprint(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
_FORKS = {
    "sys.exit": ("import os, sys\nif not (child := os.fork()):\n    sys.exit(3)" + _WAIT, 0, "3"),
    "an exception": (
        "import os\nif not (child := os.fork()):\n    raise KeyError('child')" + _WAIT,
        0,
        "1",
    ),
    "a text": ("import os, sys\nif not (child := os.fork()):\n    sys.exit('bad')" + _WAIT, 0, "1"),
    "its own exit handlers": (
        "import atexit, os, sys\n"
        "parent = os.getpid()\n"
        "atexit.register(lambda: print(f'handler {os.getpid() == parent}', flush=True))\n"
        "if not (child := os.fork()):\n    sys.exit(4)" + _WAIT,
        0,
        "handler False\n4\nhandler True",
    ),
    "the end of the script": (
        "import os, sys\nchild = os.fork()\nif child:\n    print(os.waitpid(child, 0)[1])\n    sys.exit(5)",
        5,
        "0",
    ),
    "its own output": (
        "import os, sys\nif not (child := os.fork()):\n    print('unflushed')\n    sys.exit(0)" + _WAIT,
        0,
        "unflushed\n0",
    ),
    "multiprocessing": (
        "import multiprocessing, sys\n"
        "child = multiprocessing.get_context('fork').Process(target=sys.exit, args=(6,))\n"
        "child.start()\nchild.join()\nprint(child.exitcode)",
        0,
        "6",
    ),
}
_QUICK_FORKS = ("an exception", "its own exit handlers", "its own output")
"""One end, what is told at it, and what is written at it; the other ends are slow."""


@pytest.mark.parametrize(
    ("script", "exit_code", "printed"),
    [
        pytest.param(*case, id=name, marks=() if name in _QUICK_FORKS else pytest.mark.slow)
        for name, case in _FORKS.items()
    ],
)
def test_the_end_of_a_forked_child_is_not_that_of_the_rank(
    folder: Path, script: str, exit_code: int, printed: str
) -> None:
    run = _runner(folder, _script(folder, script))
    assert (run.returncode, run.stdout.strip()) == (exit_code, printed), run.stderr
    assert _record(folder)["exit_code"] == exit_code


def test_a_child_that_outlives_its_rank_changes_nothing_about_its_end(folder: Path) -> None:
    text = "import os, sys, time\nif not os.fork():\n    time.sleep(1)\n    sys.exit(7)\nprint('done')"
    run = _runner(folder, _script(folder, text))
    assert (run.returncode, run.stdout) == (0, "done\n")
    assert _record(folder)["exit_code"] == 0
