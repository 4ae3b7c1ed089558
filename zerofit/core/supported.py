"""The supported releases of Python and of each library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.core.optimizers.lookup import REPLACEMENTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.core.facts import Versions
    from zerofit.core.strategy import Strategy


_NUMBERS = re.compile(r"\d+(\.\d+)*")


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without trailing zeros: (2, 13) of "2.13.0+cpu".

    packaging.version would take longer to import than the whole catalog takes to read. A development version
    or release candidate counts as the release that it leads to.

    Args:
        version: begins with a number.
    """
    found = _NUMBERS.match(version)
    numbers = [int(number) for number in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedRange:
    """The supported releases of one package."""

    package: str
    at_least: str
    """The oldest release."""
    below: str = ""
    """The first unsupported release; empty if none is known."""
    tested: str = ""
    """The newest release tested."""

    @property
    def specifier(self) -> str:
        """The range as pip specifier, such as ">=5.0,<6"."""
        return f">={self.at_least}" + (f",<{self.below}" if self.below else "")

    def has(self, version: str) -> bool:
        """Return True if a version is supported."""
        release = release_of(version)
        return release >= release_of(self.at_least) and not (self.below and release >= release_of(self.below))

    def is_untested(self, version: str) -> bool:
        """Return True if a version is supported but newer than all tested ones."""
        return self.has(version) and release_of(version) > release_of(self.tested)


SUPPORTED = {
    supported.package: supported
    for supported in (
        SupportedRange(package="torch", at_least="2.8", tested="2.13.0"),
        SupportedRange(package="accelerate", at_least="1.10", below="2", tested="1.15.0"),
        # Before 0.18.3 stages 1 and 2 keep only the gradients of an accumulation window's last micro-batch
        # (0.17.6 to 0.18.2), and the engine has no hooks for a script's own backward().
        SupportedRange(package="deepspeed", at_least="0.18.3", below="0.20", tested="0.19.8"),
        SupportedRange(package="transformers", at_least="5.0", below="6", tested="5.23.0"),
        SupportedRange(package="huggingface_hub", at_least="1.3", below="3", tested="2.4.0"),
        SupportedRange(package="peft", at_least="0.18", below="1", tested="0.21.2"),
        SupportedRange(package="bitsandbytes", at_least="0.46.1", below="1", tested="0.50.2"),
    )
}
"""Packages of a run, as in pyproject.toml and constraints.txt."""
PYTHON = SupportedRange(package="Python", at_least="3.11", tested="3.13")
"""Supported Python versions; pip refuses others."""
ALWAYS_USED = ("torch", "accelerate", "deepspeed", "transformers", "huggingface_hub")
"""Packages that every run, capture and generation imports; the others depend on the strategy."""
USED_BY_TRACES = ("torch", "transformers", "huggingface_hub")
"""Packages that tracing a model imports."""


def packages_of(strategy: Strategy) -> tuple[str, ...]:
    """Return the packages that a strategy imports in addition to ALWAYS_USED."""
    optimizer = REPLACEMENTS[strategy.optimizer] if strategy.optimizer is not None else None
    is_of_bitsandbytes = optimizer is not None and optimizer.bits is not None
    needs_bitsandbytes = is_of_bitsandbytes or strategy.quantization is not None
    return (
        *(("peft",) if strategy.lora is not None else ()),
        *(("bitsandbytes",) if needs_bitsandbytes else ()),
    )


def unsupported(versions: Versions, packages: Iterable[str]) -> UserError | None:
    """Return the error that lists missing packages and unsupported releases.

    Args:
        versions: the installed ones.
        packages: those that will be imported.
    """
    found, why, fix = [], [], []
    for package in packages:
        version, supported = getattr(versions, package), SUPPORTED[package]
        if version is not None and supported.has(version):
            continue
        found.append(f"{package} {version}" if version else f"no {package}")
        why.append(f"{package}{supported.specifier}")
        fix.append(f"'{package}{supported.specifier}'")
    if not found:
        return None
    return UserError(
        "version-unsupported",
        "a library is missing, or has an unsupported version",
        found=", ".join(found),
        why=f"zerofit supports {', '.join(why)}",
        fix=f"pip install {' '.join(fix)}",
    )


def untested(versions: Versions) -> tuple[str, ...]:
    """Return a sentence for each installed release that is supported and newer than all tested ones.

    They are not refused: most of them work, and refusing would lock users out until the next release of
    zerofit.
    """
    python = ".".join(versions.python.split(".")[:2])  # its patch releases change nothing
    installed = [
        (PYTHON, python),
        *((library, getattr(versions, library.package)) for library in SUPPORTED.values()),
    ]
    return tuple(
        f"{library.package} {version} is newer than {library.tested}, the newest that zerofit was tested with"
        for library, version in installed
        if version is not None and library.is_untested(version)
    )
