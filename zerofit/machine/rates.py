"""The rates of a machine: its own calibration first, then zerofit/catalog/rates.toml."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.atomic_file import write_whole
from zerofit.core.bounded_read import read_bounded
from zerofit.core.cache_folder import cache_folder
from zerofit.core.catalog_folder import CATALOG_FOLDER
from zerofit.core.rates import Basis, Rate, RateName, Rates, Unit
from zerofit.core.validation import parse_strictly
from zerofit.machine.gpus import probe_driver
from zerofit.machine.versions import probe_versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.facts import Machine

_CATALOG = os.path.join(CATALOG_FOLDER, "rates.toml")
CALIBRATION_VERSION = 2
"""Raised whenever the measurements change: older calibrations are then ignored."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The content of a calibration file."""

    machine: dict[str, Any]
    rates: tuple[Rate, ...]


@cache
def catalog_rates() -> Rates:
    """Return the catalog's rates, which hold for any machine."""
    return read_rates(_CATALOG)


def read_rates(file_name: str) -> Rates:
    """Return the rates of a file in the format of zerofit/catalog/rates.toml.

    Raises:
        KeyError: a rate lacks a required key; the file's head lists them.
        ValueError: it is no TOML, or has an unknown name.
    """
    with open(file_name, "rb") as file:
        return Rates(rates=tuple(_rate(plain) for plain in tomllib.load(file)["rate"]))


def probe_rates(machine: Machine, *, environ: Mapping[str, str] = os.environ) -> Rates:
    """Return the rates of this machine: those of its calibration, if any, before the catalog's.

    Args:
        machine: this machine, with the GPUs that a run may use. For other machines use catalog_rates().
        environ: the environment.
    """
    return Rates(rates=(*read_calibration(machine, environ=environ), *catalog_rates().rates))


_LARGEST = 16 * 1024 * 1024
"""Bytes of a calibration. ASSUMPTION."""


def read_calibration(machine: Machine, *, environ: Mapping[str, str] = os.environ) -> tuple[Rate, ...]:
    """Return this machine's calibration; empty if there is none.

    A damaged or impossible file is ignored with a warning on stderr.
    """
    path = calibration_file(machine, environ=environ)
    try:
        data = read_bounded(path, most_bytes=_LARGEST)
    except OSError:
        return ()
    try:
        rates = parse_strictly(_Kept, data.decode()).rates
        if not all(math.isfinite(rate.value) and rate.value > 0 for rate in rates):
            raise ValueError("a rate is not positive and finite")
    except ValueError as error:  # includes pydantic's errors
        told = " ".join(str(error).split())[:200]
        print(
            f"zerofit: {path} is ignored: {told}; zerofit doctor --calibrate measures again", file=sys.stderr
        )
        return ()
    return rates


def write_calibration(
    machine: Machine, rates: tuple[Rate, ...], *, environ: Mapping[str, str] = os.environ
) -> Path:
    """Write this machine's calibration, replacing an earlier one, and return its file.

    Raises:
        OSError: it can't be written; an earlier one is kept.
    """
    path = calibration_file(machine, environ=environ)
    document = {
        "machine": _identity(machine),
        "rates": [dataclasses.asdict(rate) for rate in rates],
    }
    write_whole(path, json.dumps(document, indent=2) + "\n")
    return path


def calibration_file(machine: Machine, *, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the calibration file of this machine: one per set of GPUs, driver, CPU and torch."""
    text = json.dumps(_identity(machine), sort_keys=True)
    name = f"rates-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    return cache_folder(environ, Path(os.path.expanduser("~"))) / name


def _identity(machine: Machine) -> dict[str, Any]:
    """Return the facts that identify a machine as far as its rates are concerned."""
    driver = probe_driver() if machine.gpus else None
    return {
        "version": CALIBRATION_VERSION,
        "gpus": [gpu.name for gpu in machine.gpus],
        "driver": driver.version if driver else None,
        "cpu": cpu_name(),
        "cpu_cores": machine.num_cpu_cores,
        "torch": probe_versions().torch,
    }


def cpu_name(path: str = "/proc/cpuinfo") -> str:
    """Return the name of this machine's CPU; empty if unknown."""
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
        gpus=tuple(plain.get("gpus", ())),
    )
