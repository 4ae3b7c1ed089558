"""The machine and the library versions that a measurement is stored with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

import zerofit


def circumstances(*packages: str) -> dict[str, Any]:
    """Return the machine, and the versions of Python, zerofit and these packages."""
    return {
        "machine": {"num_cores": os.cpu_count(), "platform": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "zerofit": zerofit.__version__,
            **{name: version(name) for name in packages},
        },
    }
