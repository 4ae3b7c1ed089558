"""Golden files with --update-golden, and zerofit run as a user runs it."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

_GOLDEN = Path(__file__).parent / "golden"
_UPDATE = "--update-golden"


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
    """Return a function that runs `python -m zerofit ARGS` in a folder, and waits for its end."""

    def run(
        *arguments: str,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 240,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "zerofit", *arguments],
            cwd=cwd,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    return run


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


_BUILD = """
from deepspeed.accelerator import get_accelerator
for name in ("CPUAdamBuilder", "ShareMemCommBuilder"):
    get_accelerator().create_op_builder(name).load(verbose=False)
"""


@pytest.fixture(scope="session")
def built_ops() -> None:
    """Build what DeepSpeed compiles at its first use on CPU ranks, outside of any run with a time limit.

    A run that is ended in the middle of the build leaves a lock, on which every later run waits.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # ninja
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": path}
    subprocess.run([sys.executable, "-c", _BUILD], env=environment, capture_output=True, check=True)
