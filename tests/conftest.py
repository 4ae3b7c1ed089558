"""The environment that tests run in, golden files with --update-golden, and zerofit run as a user runs it."""

from __future__ import annotations

import difflib
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from typed_flags import check_flags_were_typed
from zerofit_in_process import run_in_process

from zerofit.machine.extensions import extensions_folders, find_build_locks

_GOLDEN = Path(__file__).parent / "golden"
_UPDATE = "--update-golden"


_NOT_THE_TESTS_BUSINESS = re.compile(
    # The terminal and the language of whoever starts the suite.
    r"TERM|COLORTERM|COLUMNS|LINES|NO_COLOR|FORCE_COLOR|CLICOLOR\w*|TTY_\w+|LANG|LANGUAGE|LC_\w+|TZ|PAGER"
    # A launcher's or a scheduler's, where the suite itself runs in a job.
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT)|(TORCHELASTIC|SLURM|PMI|OMPI)_\w+"
    # Settings of the libraries that a run is made of.
    r"|(ACCELERATE|DS|DEEPSPEED|FSDP|ZEROFIT|TRANSFORMERS|DATASETS|WANDB|MLFLOW|COMET|TRL|NCCL|GLOO)_\w+"
    r"|HF_(?!HOME$)\w+|CUDA_VISIBLE_DEVICES|OMP_\w+|MKL_\w+|TORCH_(?!EXTENSIONS_DIR$)\w+|PYTORCH_\w+"
)
"""Variables that the suite does without, whoever starts it: a test that is about one sets it itself."""


def pytest_configure(config: pytest.Config) -> None:
    for name in _settings():
        del os.environ[name]
    os.environ["HF_HUB_OFFLINE"] = "1"
    # One build for all home folders, at the place where setup.sh puts it.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    # Another ninja than the environment's takes what this one has built for out of date, and builds it anew.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(time, "tzset"):
        time.tzset()


_AT_FIRST = (
    "scripts/capture/child",
    "launching",
    "semantics",
    "generation",
    "training",
    "benchmarks",
)
"""Folders whose files take longest: begun first, so that no core waits for another one's last file."""
_SHARE_FIXTURES = (
    re.compile(r"tests/scripts/capture/child/"),
    re.compile(r"tests/launching/test_(tensor|sequence|pipeline)_parallel\.py"),
)
"""Files that share what takes long to make: one process runs all of a pattern's."""


_LONG_TESTS = Path(__file__).parent / "long_tests.json"
"""Tests that `make test` leaves to `make test-long`, each with its seconds (tools/write_long_tests.py)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _turn(item.nodeid))
    long = json.loads(_LONG_TESTS.read_text(encoding="utf-8"))
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Leave thousands of tests out of each garbage collection, and train tiny models on one thread.

    zerofit and torch collect often; two threads that share a core wait for each other.
    """
    gc.collect()
    gc.freeze()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests in one process, and those of some folders."""
    if config.getvalue("dist") != "loadfile":
        return None  # xdist's own
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = (one.pattern for one in _SHARE_FIXTURES if one.match(nodeid))
            return next(shared, super()._split_scope(nodeid))

    return ByFile(config, log)


def _turn(nodeid: str) -> int:
    return next((turn for turn, folder in enumerate(_AT_FIRST) if nodeid.startswith(f"tests/{folder}/")), 99)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_UPDATE, action="store_true", help="Write the files of tests/golden anew.")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with tests/golden/NAME, or, with --update-golden, writes it."""
    update = request.config.getoption(_UPDATE)

    def compare(text: str, name: str) -> None:
        path = _GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists():
            pytest.fail(f"tests/golden/{name} is missing: make it with pytest {_UPDATE}", pytrace=False)
        elif (expected := path.read_text(encoding="utf-8")) != text:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), f"tests/golden/{name}", "now", lineterm=""
            )
            report = "\n".join(lines) or "only line ends differ"
            pytest.fail(f"{report}\nif this is meant: pytest {_UPDATE}", pytrace=False)

    return compare


@pytest.fixture
def run_zerofit() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `zerofit ARGS` in a folder as `python -m zerofit` does, in this process.

    Its errors and warnings must name no flag that is not among ARGS. Commands that start ranks, or are sent
    signals, are run by `zerofit_process`.
    """

    def run(
        *arguments: str,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        stdin: str = "",
        stdout: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        done = run_in_process(arguments, cwd=cwd, environment=environment, stdin=stdin, stdout=stdout)
        check_flags_were_typed(arguments, done.stderr)
        return done

    return run


@pytest.fixture
def zerofit_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `python -m zerofit ARGS` in a folder, and waits for its end.

    It takes a second, and more where libraries are imported: most tests need `run_zerofit`. Its errors and
    warnings must name no flag that is not among ARGS.
    """

    def run(
        *arguments: str,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 240,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "zerofit", *arguments],
            cwd=cwd,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        check_flags_were_typed(arguments, done.stderr)
        return done

    return run


@pytest.fixture(scope="session")
def _same_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("same") / "folder"


@pytest.fixture
def same_folder(_same_folder: Path) -> Path:
    """Return an empty folder at the same path for each test: a script is captured once and then cached."""
    shutil.rmtree(_same_folder, ignore_errors=True)
    _same_folder.mkdir()
    return _same_folder


@pytest.fixture(autouse=True)
def _no_settings_left_behind() -> Iterator[None]:
    """Put variables of terminals, launchers and libraries back: some are set for all that come later."""
    before = _settings()
    yield
    for name in _settings().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _settings() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if _NOT_THE_TESTS_BUSINESS.fullmatch(name)}


@pytest.fixture(autouse=True)
def _no_overrides_left_behind() -> Iterator[None]:
    """Forget bitsandbytes' overrides: it keeps them by place in the optimizer, for all that come later."""
    yield
    optimizers = sys.modules.get("bitsandbytes.optim")
    if optimizers is not None:
        optimizers.GlobalOptimManager.get_instance().initialize()


@pytest.fixture(autouse=True)
def _no_accelerators_left_behind() -> Iterator[None]:
    """Forget accelerate's state: the first Accelerator of a process decides for all that come later."""
    yield
    states = sys.modules.get("accelerate.state")
    if states is not None:
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()


_BUILD_OPS = Path(__file__).parents[1] / "tools" / "build_ops.py"


def _build(builder: str, op: str) -> None:
    """Compile one of DeepSpeed's ops, unless `setup.sh` or an earlier run has."""
    top, folder = extensions_folders(environ=os.environ, home=Path.home(), cuda_version=None)
    for lock in find_build_locks(top):
        if not lock.is_held:  # of a test run that was killed: this one would wait for it for ever
            Path(lock.path).unlink(missing_ok=True)
    sources = (util.find_spec(name) for name in ("deepspeed", "torch"))
    installed = max(Path(source.origin).stat().st_mtime for source in sources if source and source.origin)
    if any(built.stat().st_mtime > installed for built in (folder / op).glob(f"{op}*.so")):
        return
    command = [sys.executable, str(_BUILD_OPS), builder]
    subprocess.run(command, capture_output=True, check=True)


@pytest.fixture(scope="session")
def built_comm() -> None:
    """Build what DeepSpeed compiles at its first use on any CPU ranks, outside of any run with a time limit.

    A run that is ended in the middle of the build leaves a lock, on which every later run waits.
    """
    _build("ShareMemCommBuilder", "deepspeed_shm_comm")


@pytest.fixture(scope="session")
def built_ops(built_comm: None) -> None:
    """Build the CPU Adam, too, in which offload of the optimizer ends."""
    _build("CPUAdamBuilder", "cpu_adam")


@pytest.fixture(scope="session")
def built_optimizers(built_ops: None) -> None:
    """Build FusedAdam for the CPU, too: the Adam of a DeepSpeed file without offload."""
    _build("FusedAdamBuilder", "fused_adam")
