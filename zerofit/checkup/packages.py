"""Verdicts on the installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checkup.line import CheckupLine, ok, warning
from zerofit.supported import SUPPORTED

if TYPE_CHECKING:
    from zerofit.facts import Versions

_USES = {
    "torch": "everything runs on it",
    "accelerate": "zerofit launch starts the ranks through it",
    "deepspeed": "ZeRO and offload are its work",
    "transformers": "models and Trainer come from it",
    "huggingface_hub": "models and datasets are fetched with it",
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
    supported = SUPPORTED[name]
    wanted = f"'{name}{supported.specifier}'"
    if version is None:
        return warning(name, "not installed", why=use, fix=f"pip install {wanted}")
    found = f"{version} (supported: {supported.specifier})"
    if not supported.has(version):
        return warning(name, found, why="zerofit does not run on it", fix=f"pip install {wanted}")
    if supported.is_untested(version):
        why = f"zerofit was tested with {supported.tested} and older ones only"
        return warning(name, found, why=why, fix=f"pip install '{name}<={supported.tested}' if it fails")
    return ok(name, found)
