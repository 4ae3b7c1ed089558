"""Which DeepSpeed releases the engines were read from and compared with, and what is in doubt for others."""

from __future__ import annotations

_READ = "0.19.8"
"""Every file and line that the engines name is of this release, and so are the measured CPU ranks."""
_DOUBTS = (
    # (releases below, what may differ)
    ((0, 19), "how it flattens weights, keeps gradients and releases gathered parameters was not compared"),
    ((1, 0), "only 0.19.8 was compared; other releases of 0.19 and later may allocate otherwise"),
)
"""The first line whose release lies above the one that runs holds."""


def doubt_about(deepspeed: str | None) -> str | None:
    """Return why memory under this DeepSpeed is less certain than measured; None for the release compared."""
    if deepspeed == _READ:
        return None
    if deepspeed is None:
        return "the release of DeepSpeed is not known"
    numbers = tuple(int(part) for part in deepspeed.split("+")[0].split(".")[:2] if part.isdigit())
    return next((doubt for below, doubt in _DOUBTS if numbers < below), _DOUBTS[-1][1])
