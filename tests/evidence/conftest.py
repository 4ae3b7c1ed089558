"""Shared by the evidence tests: one runner, with a cache outside the repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from harness.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Iterator

_ANEW = "--anew"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_ANEW, action="store_true", help="Run all evidence anew, whatever ran before.")


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Runs examples; what ran before with the same files, versions and harness is read from the cache."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    anew = request.config.getoption(_ANEW, default=False)
    with Runner(caches / "zerofit-evidence", anew=anew) as runner:
        yield runner


@pytest.fixture(scope="session", autouse=True)
def _ops(request: pytest.FixtureRequest) -> None:
    """Build DeepSpeed's ops first, if any test runs something: FusedAdam is in no environment yet."""
    if any(test.get_closest_marker("evidence") for test in request.session.items):
        request.getfixturevalue("built_optimizers")
