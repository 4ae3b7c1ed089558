"""Which rate holds for a GPU: the one measured here, else that of its generation."""

from __future__ import annotations

import pytest

from zerofit.core.rates import Basis, Rate, RateName, Rates, Unit


def _rate(
    value: float,
    *,
    basis: Basis = Basis.PUBLISHED,
    since: tuple[int, int] = (0, 0),
    gpus: tuple[str, ...] = (),
) -> Rate:
    return Rate(
        name=RateName.ATTENTION,
        value=value,
        unit=Unit.FRACTION,
        basis=basis,
        source="test",
        least_compute_capability=since,
        gpus=gpus,
    )


_OLD, _AMPERE, _HOPPER = _rate(0.1), _rate(0.2, since=(8, 0)), _rate(0.3, since=(9, 0))
_HERE = _rate(0.9, basis=Basis.MEASURED)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(None, 0.1), ((7, 0), 0.1), ((8, 0), 0.2), ((8, 9), 0.2), ((9, 0), 0.3), ((12, 0), 0.3)],
)
def test_a_generation_without_a_rate_of_its_own_takes_the_one_before(
    capability: tuple[int, int] | None, expected: float
) -> None:
    assert Rates(rates=(_HOPPER, _OLD, _AMPERE)).of(RateName.ATTENTION, capability).value == expected


@pytest.mark.parametrize(
    ("gpu", "capability", "expected"),
    [
        ("", (9, 0), 0.3),
        ("NVIDIA H100 PCIe", (9, 0), 0.3),
        ("NVIDIA H100 80GB HBM3", (9, 0), 0.35),
        ("NVIDIA H200", (9, 0), 0.4),
        ("Tesla T4", (7, 5), 0.05),
        ("NVIDIA T4", (7, 5), 0.05),
    ],
)
def test_a_rate_of_one_gpu_goes_before_its_generations_and_says_nothing_of_others(
    gpu: str, capability: tuple[int, int], expected: float
) -> None:
    own = (
        _rate(0.35, gpus=("NVIDIA H100 80GB HBM3",)),
        _rate(0.4, gpus=("NVIDIA H200",)),
        _rate(0.05, gpus=("Tesla T4", "NVIDIA T4")),
    )
    for rates in ((*own, _HOPPER, _OLD, _AMPERE), (_OLD, _AMPERE, _HOPPER, *own)):
        assert Rates(rates=rates).of(RateName.ATTENTION, capability, gpu=gpu).value == expected


@pytest.mark.parametrize("rates", [(_HERE, _OLD, _HOPPER), (_OLD, _HOPPER, _HERE)])
def test_what_was_measured_here_goes_before_the_catalog(rates: tuple[Rate, ...]) -> None:
    own = _rate(0.4, gpus=("NVIDIA H200",))
    assert Rates(rates=(own, *rates)).of(RateName.ATTENTION, (9, 0), gpu="NVIDIA H200") is _HERE


def test_a_rate_that_is_not_known_is_no_zero() -> None:
    with pytest.raises(KeyError):
        Rates(rates=(_AMPERE,)).of(RateName.ATTENTION, (7, 0))
