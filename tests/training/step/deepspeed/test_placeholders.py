"""A script's error beside a weight that ZeRO-3 holds in shards is named."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
import torch

from zerofit.training.step.deepspeed.placeholders import sharded_weight_error

if TYPE_CHECKING:
    from collections.abc import Callable


class _Status(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2


def _weight(status: _Status) -> Any:
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_status = status  # type: ignore[attr-defined]
    return weight


def _error_of(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError


def _average(weight: Any) -> None:
    torch.ones(4, 4).lerp_(weight.detach(), 0.1)


def _norm(weight: Any) -> None:
    torch.linalg.matrix_norm(weight, 2)


def _position(weight: Any) -> None:
    torch.arange(8)[weight.shape[0] + 8]


def _average_in_lines(weight: Any) -> None:
    torch.ones(4, 4).lerp_(
        weight.detach(),
        0.1,
    )


@pytest.mark.parametrize("works_with", [_average, _norm, _position, _average_in_lines])
def test_a_failure_beside_a_sharded_weight_is_named(works_with: Callable[[Any], None]) -> None:
    error = _error_of(lambda: works_with(_weight(_Status.NOT_AVAILABLE)))
    named = sharded_weight_error(error)
    assert named is not None
    assert named.rule == "weight-sharded-by-zero3"
    assert f"weight in {__file__}" in named.found
    message = str(error).partition("\n")[0]
    assert message
    assert named.found.endswith(f": {type(error).__name__}: {message}")


def test_a_gathered_weight_is_no_cause() -> None:
    assert sharded_weight_error(_error_of(lambda: _average(_weight(_Status.AVAILABLE)))) is None


def test_another_failure_is_left_as_it_is() -> None:
    def fail() -> None:
        raise KeyError("text")

    assert sharded_weight_error(_error_of(fail)) is None
    assert sharded_weight_error(_error_of(lambda: _average(torch.ones(3)))) is None
