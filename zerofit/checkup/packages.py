"""Verdicts on the installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checkup.line import CheckupLine, ok, warning

if TYPE_CHECKING:
    from zerofit.facts import Versions

_USES = {
    "torch": "everything runs on it",
    "accelerate": "zerofit launch starts the ranks through it",
    "deepspeed": "ZeRO and offload are its work",
    "transformers": "models and Trainer come from it",
    "peft": "LoRA adapters come from it",
    "bitsandbytes": "8-bit optimizers come from it",
}


def check_packages(versions: Versions) -> tuple[CheckupLine, ...]:
    """Return a line for Python, zerofit and each package a run is made of."""
    return (
        ok("python", versions.python),
        ok("zerofit", versions.zerofit),
        *(_check_package(name, getattr(versions, name), use) for name, use in _USES.items()),
    )


def _check_package(name: str, version: str | None, use: str) -> CheckupLine:
    if version is not None:
        return ok(name, version)
    return warning(name, "not installed", why=use, fix=f"pip install {name}")
