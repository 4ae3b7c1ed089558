"""Clipping of the script, by accelerate or by torch, and the plan's in its place."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerators import hooked, settings, wrap_all
from torch.nn.utils import clip_grad

from zerofit.training.step import clipping

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN = (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_)


@pytest.fixture(autouse=True)
def _torchs_own() -> Iterator[None]:
    yield
    for place in (torch.nn.utils, clip_grad):
        place.clip_grad_norm_, place.clip_grad_value_ = OWN  # type: ignore[attr-defined]


def clipped(forced: float | None) -> tuple[Any, Any, Any, Any]:
    """Return an Accelerator, a model with gradients of norm 5, its optimizer, and the list of changes."""
    accelerator_class, changes = hooked(gradient_clipping=forced)
    wanted = settings(gradient_clipping=forced)
    wrap_all(torch.nn.utils, clipping.torch_wrappers(torch.nn.utils, wanted, changes))
    clipping.install_in_clip_grad(torch.nn.utils, wanted, changes)
    accelerator = accelerator_class()
    model = torch.nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    set_gradients(model)
    return accelerator, model, optimizer, changes


def set_gradients(model: Any) -> None:
    model.weight.grad = torch.tensor([[3.0, 4.0]])


def norm(model: Any) -> float:
    return model.weight.grad.norm().item()


def by_accelerate(accelerator: Any, model: Any, max_norm: float) -> Any:
    return accelerator.clip_grad_norm_(model.parameters(), max_norm)


def by_torch(_: Any, model: Any, max_norm: float) -> Any:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def by_torchs_module(_: Any, model: Any, max_norm: float) -> Any:
    return clip_grad.clip_grad_norm_(model.weight, max_norm)


@pytest.mark.parametrize("clip", [by_accelerate, by_torch, by_torchs_module])
@pytest.mark.parametrize(
    ("forced", "says", "left"),
    [(None, 1.0, 1.0), (None, 0.0, 0.0), (2.0, 1.0, 2.0), (0.0, 1.0, 5.0), (0.0, 0.0, 5.0)],
)
def test_gradients_after_clipping(clip: Any, forced: float | None, says: float, left: float) -> None:
    accelerator, model, optimizer, changes = clipped(forced)
    assert clip(accelerator, model, says).item() == 5.0
    assert norm(model) == pytest.approx(left, abs=1e-5)
    optimizer.step()  # the plan clips no second time
    assert norm(model) == pytest.approx(left, abs=1e-5)
    line = f"gradients are clipped to {forced or 0:g} (0 is off); the script says {says:g}"
    assert changes.lines == ((line,) if forced not in (None, says) else ())


def test_clipping_to_ever_new_norms_is_noted_once() -> None:
    accelerator, model, _, changes = clipped(2.0)
    for says in (1.0, 1.5, 3.0):
        by_accelerate(accelerator, model, says)
    assert changes.lines == ("gradients are clipped to 2 (0 is off); the script says 1",)


def test_clipping_what_no_accelerator_knows_is_torchs() -> None:
    clipped(2.0)
    other = torch.nn.Linear(2, 1, bias=False)
    set_gradients(other)
    by_torch(None, other, 1.0)
    assert norm(other) == pytest.approx(1.0)
    assert torch.nn.utils.clip_grad_norm_([], 1.0) == 0
    torch.nn.utils.clip_grad_value_(other.parameters(), 0.1)
    assert other.weight.grad is not None
    assert other.weight.grad.max() == pytest.approx(0.1)


def test_torch_clips_the_values_of_an_accelerators_model_where_no_engine_holds_its_gradients() -> None:
    accelerator, model, _, _ = clipped(None)
    torch.nn.utils.clip_grad_value_(model.parameters(), 3.5)
    assert accelerator._models == [model]
    assert model.weight.grad.tolist() == [[3.0, 3.5]]


def test_early_pieces_are_taken_back_before_torch_clips() -> None:
    accelerator, model, _, _ = clipped(None)

    def settle(*, except_for: Any | None = None) -> None:
        model.weight.grad -= torch.tensor([[3.0, 0.0]])

    accelerator._zerofit_pending_backward = SimpleNamespace(settle=settle)
    assert by_torch(accelerator, model, math.inf).item() == 4.0
