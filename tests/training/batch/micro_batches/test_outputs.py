"""What a script sees of a forward pass that was split: one output, of the model's own class."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import pytest
import torch
from split_models import assert_equal, gradients, split, tiny

from zerofit.core.errors import UserError


def _close(found: Any, expected: Any) -> bool:
    return bool(torch.allclose(found, expected, atol=1e-5))


_LOOKS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda outputs: outputs.logits,
    "key": lambda outputs: outputs["logits"],
    "place": lambda outputs: outputs[1],
    "place from the end": lambda outputs: outputs[-1],
    "slice": lambda outputs: outputs[1:][0],
    "tuple": lambda outputs: outputs.to_tuple()[1],
    "dict": lambda outputs: dict(**outputs)["logits"],
    "dict of it": lambda outputs: dict(outputs)["logits"],
    "get": lambda outputs: outputs.get("logits"),
    "items": lambda outputs: dict(outputs.items())["logits"],
    "values": lambda outputs: list(outputs.values())[1],
    "two keys": lambda outputs: [outputs[key] for key in outputs][1],
    "getattr": lambda outputs: getattr(outputs, "logits", None),
    "as a dataclass": lambda outputs: [getattr(outputs, one) for one in outputs.__dataclass_fields__][1],
    "copy": lambda outputs: copy.copy(outputs).logits,
    "pytree": lambda outputs: torch.utils._pytree.tree_flatten(outputs)[0][1],
}


@pytest.mark.parametrize("look", _LOOKS.values(), ids=_LOOKS)
def test_logits_come_however_the_script_looks_at_them(look: Callable[[Any], Any]) -> None:
    model, batch = tiny("classification")
    expected = model(**batch)
    split(model)
    outputs = model(**batch)
    assert isinstance(outputs, type(expected))
    assert type(outputs).__name__ == "SequenceClassifierOutput"
    assert (list(outputs), len(outputs)) == (["loss", "logits"], 2)
    assert outputs.hidden_states is None
    assert _close(look(outputs), expected.logits)
    assert _close(outputs.loss, expected.loss)


def test_logits_are_computed_again_only_the_first_time() -> None:
    model, batch = tiny("classification")
    made = split(model)
    made.backward(model(**batch).loss)
    made.num_forwards = 0
    outputs = model(**batch)
    assert made.num_forwards == 3
    assert outputs.logits is outputs.logits
    assert made.num_forwards == 6
    assert model(**batch).logits.shape == (5, 2)
    assert made.num_forwards == 9


def test_outputs_can_be_pickled_and_printed() -> None:
    model, batch = tiny("classification")
    split(model)
    with torch.no_grad():
        expected = model(**batch)
    outputs = model(**batch)
    assert "logits=tensor(" in repr(outputs)
    plain = copy.copy(outputs)
    assert type(plain) is type(expected)
    detached = type(plain)(**{key: value.detach() for key, value in plain.items()})
    assert _close(pickle.loads(pickle.dumps(detached)).logits, expected.logits)
    assert _close(asdict(detached)["logits"], expected.logits)


def test_a_loss_can_be_changed_in_place() -> None:
    model, batch = tiny("vit")
    (model(**batch).loss * 3).backward()
    expected = gradients(model)
    made = split(model)
    for _ in range(3):
        loss = model(**batch).loss
        assert loss.grad_fn is not None
        loss *= 3
        made.backward(loss)
        assert_equal(gradients(model), expected)


class _Pair(NamedTuple):
    states: Any
    names: Any


class _Nested(torch.nn.Module):
    """Gives its outputs in every form that a model may choose."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.form = form

    def forward(self, x: Any) -> Any:
        states = self.linear(x)
        forms = {
            "tensor": states,
            "scalar": states.pow(2).mean(),
            "tuple": (states.pow(2).mean(), states),
            "list": [states, None],
            "named tuple": _Pair(states, "name"),
            "dict": {"loss": states.pow(2).mean(), "states": states, "count": 3},
            "nested": {"layers": (states, {"last": states.relu()}), "scale": self.scale * 2},
            "flattened": {"flat": states.repeat_interleave(2, dim=0)},
            "cache": (states, object()),
        }
        return forms[self.form]


def _sum(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, torch.Tensor):
        return (outputs * torch.arange(1.0, 1 + outputs.numel()).reshape(outputs.shape)).sum()
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    parts = [_sum(one) for one in outputs if isinstance(one, (torch.Tensor, Mapping, list, tuple))]
    return torch.stack(parts).sum()


@pytest.mark.parametrize(
    "form",
    ["tensor", "scalar", "tuple", "list", "named tuple", "dict", "nested", "flattened", "cache"],
)
def test_outputs_of_any_form(form: str) -> None:
    torch.manual_seed(0)
    model, x = _Nested(form), torch.randn(7, 3)
    whole = model(x)
    _sum(whole).backward()
    expected = gradients(model)
    made = split(model, 3)
    for _ in range(4):
        outputs = model(x)
        assert type(outputs) is type(whole)
        assert _sum(outputs).item() == pytest.approx(_sum(whole).item(), rel=1e-5)
        made.backward(_sum(outputs))
        assert_equal(gradients(model), expected)
    if form == "cache":
        assert outputs[1] is None
    if form == "dict":
        assert outputs["count"] == 3


def test_an_output_that_cannot_be_joined_is_refused() -> None:
    class TimeFirst(_Nested):
        def forward(self, x: Any) -> Any:
            return self.linear(x).T.contiguous()

    model = TimeFirst("tensor")
    split(model)
    with pytest.raises(UserError, match="can't be split") as error:
        model(torch.randn(6, 3))
    assert error.value.found == "the output has shape (4, 4) for 4 samples, and (8, 2) joined from two halves"
