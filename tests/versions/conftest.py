"""Keeps what the smoke tests showed on one set of versions, for docs/reference/versions.md."""

from __future__ import annotations

import dataclasses
import json
from datetime import date
from pathlib import Path

import pytest

from zerofit.machine.versions import probe_versions

_MEASURED = Path(__file__).parent / "measured"
_SET = "--set"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_SET, metavar="NAME", help="Write what was shown to tests/versions/measured/NAME.json.")


class _Kept:
    """Results of each test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._peaks: dict[str, object] = {}
        self._order: dict[str, int] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._order = {_name(nodeid): number for number, nodeid in enumerate(ids)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = _name(report.nodeid)
        self._seconds[name] = self._seconds.get(name, 0) + report.duration  # its fixtures' among them
        if not report.passed:
            self._failed.add(name)
        told = dict(report.user_properties)
        if "peak_bytes" in told:
            self._peaks[name] = told["peak_bytes"]

    def pytest_sessionfinish(self) -> None:
        checks = [
            {"check": name, "passed": name not in self._failed, "seconds": round(seconds)}
            | ({"peak_bytes": self._peaks[name]} if name in self._peaks else {})
            for name, seconds in sorted(self._seconds.items(), key=lambda one: self._order.get(one[0], 0))
        ]
        if not checks:
            return
        kept = {
            "measured_on": date.today().isoformat(),
            "versions": dataclasses.asdict(probe_versions()),
            "checks": checks,
        }
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(f"{json.dumps(kept, indent=1)}\n", encoding="utf-8")


def _name(nodeid: str) -> str:
    return nodeid.partition("::test_")[2].replace("_", " ")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption(_SET, default=None)
    if name is not None and not hasattr(config, "workerinput"):  # workers report to the process that writes
        config.pluginmanager.register(_Kept(_MEASURED / f"{name}.json"))
