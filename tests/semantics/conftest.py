"""What the tests of this folder share: each script by itself, run once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from trainings import WHOLE, Ended, run_plainly

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="session")
def by_itself(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """Return a function that gives a script's run by plain accelerate; each is run at its first use."""
    known: dict[tuple[object, ...], Ended] = {}

    def run(script: str, *arguments: str, num_processes: int) -> Ended:
        if (script, num_processes) in WHOLE:
            arguments, num_processes = (*arguments, *WHOLE[script, num_processes]), 1
        key = (script, arguments, num_processes)
        if key not in known:
            folder = tmp_path_factory.mktemp(f"plain-{script}")
            known[key] = run_plainly(script, folder, *arguments, num_processes=num_processes)
        return known[key]

    return run


@pytest.fixture(scope="session", autouse=True)
def _ops(built_ops: None) -> None:
    """Build DeepSpeed's ops first."""
