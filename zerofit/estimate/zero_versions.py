"""Which DeepSpeed releases the engines were read from and compared with, and what is in doubt for others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Why an estimate is less certain than one that was compared."""

    reason: str
    uncertainty: float
    """Added to the relative uncertainty."""


_READ = "0.19.8"
"""Every file and line that the engines name is of this release, and so are the measured CPU ranks."""
_NEAR, _FAR = 0.02, 0.05
"""ASSUMPTION, not measured: what the releases near the one compared, and the others, add to the uncertainty.
Weights, masters and states follow from ZeRO itself; a release can change the copies and buckets beside."""
_UNKNOWN = Doubt(reason="the release of DeepSpeed is not known", uncertainty=_FAR)
_OLDER = Doubt(
    reason="how it flattens weights, keeps gradients and releases gathered parameters was not compared",
    uncertainty=_FAR,
)
_OTHER = Doubt(
    reason="only 0.19.8 was compared; other releases of 0.19 and later may allocate otherwise",
    uncertainty=_NEAR,
)


def doubt_about(deepspeed: str | None) -> Doubt | None:
    """Return why memory under this DeepSpeed is less certain than measured; None for the release compared."""
    if deepspeed is None:
        return _UNKNOWN
    release = deepspeed.split("+")[0]
    if release == _READ:
        return None
    numbers = tuple(int(part) for part in release.split(".")[:2] if part.isdigit())
    return _OLDER if numbers < (0, 19) else _OTHER
