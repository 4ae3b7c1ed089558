"""The rates of a machine: zerofit/catalog/rates.toml, and before it what was measured here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.probe.gpus import probe_driver
from zerofit.rates import Basis, Rate, RateName, Rates, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.facts import Machine

_CATALOG = os.path.join(os.path.dirname(os.path.dirname(__file__)), "catalog", "rates.toml")
CALIBRATION_VERSION = 1
"""Raised whenever what is measured, or how, changes: older calibrations are not read then."""


@cache
def catalog_rates() -> Rates:
    """Return the rates of the catalog, which hold for any machine."""
    with open(_CATALOG, "rb") as file:
        return Rates(rates=tuple(_rate(plain) for plain in tomllib.load(file)["rate"]))


def probe_rates(machine: Machine, *, environ: Mapping[str, str] = os.environ) -> Rates:
    """Return the rates of this machine: those of its calibration, if there was one, before the catalog's.

    Args:
        machine: this machine, with the GPUs that a run may use. For another machine take catalog_rates().
        environ: the environment.
    """
    return Rates(rates=(*read_calibration(machine, environ=environ), *catalog_rates().rates))


def read_calibration(machine: Machine, *, environ: Mapping[str, str] = os.environ) -> tuple[Rate, ...]:
    """Return what was measured on this machine; empty where nothing was, or the file can't be read."""
    try:
        document = json.loads(calibration_file(machine, environ=environ).read_text(encoding="utf-8"))
        return tuple(_rate(plain) for plain in document["rates"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def write_calibration(
    machine: Machine, rates: tuple[Rate, ...], *, environ: Mapping[str, str] = os.environ
) -> Path:
    """Write what was measured on this machine, in the place of what was measured before; return the file.

    The file is whole or not there at all: it is written under another name, then renamed.
    """
    path = calibration_file(machine, environ=environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": _identity(machine),
        "rates": [dataclasses.asdict(rate) for rate in rates],
    }
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def calibration_file(machine: Machine, *, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the calibration of this machine belongs: a file for each set of GPUs, driver and CPU."""
    cache_home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    text = json.dumps(_identity(machine), sort_keys=True)
    return Path(cache_home, "zerofit", f"rates-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json")


def _identity(machine: Machine) -> dict[str, Any]:
    """Return what makes a machine another machine, as far as its rates go."""
    driver = probe_driver() if machine.gpus else None
    return {
        "version": CALIBRATION_VERSION,
        "gpus": [gpu.name for gpu in machine.gpus],
        "driver": driver.version if driver else None,
        "cpu": _cpu_name(),
        "cpu_cores": machine.num_cpu_cores,
    }


def _cpu_name(path: str = "/proc/cpuinfo") -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, "")
    except OSError:
        return ""


def _rate(plain: dict[str, Any]) -> Rate:
    major, minor = plain.get("least_compute_capability", (0, 0))
    return Rate(
        name=RateName(plain["name"]),
        value=float(plain["value"]),
        unit=Unit(plain["unit"]),
        basis=Basis(plain["basis"]),
        source=plain["source"],
        least_compute_capability=(major, minor),
    )
