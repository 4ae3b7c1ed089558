"""Which ways of writing a gradient penalty the rule sees in a script's source."""

from __future__ import annotations

import pytest

from zerofit.scripts.facts import Action
from zerofit.scripts.source.read_script import read_script


@pytest.mark.parametrize(
    ("imports", "call", "is_seen"),
    [
        ("import torch", "torch.autograd.grad(loss, x, create_graph=True)", True),
        ("from torch import autograd", "autograd.grad(loss, x, create_graph=True)", True),
        ("from torch.autograd import grad", "grad(loss, x, create_graph=True)", True),
        ("import torch.autograd as ag", "ag.grad(outputs=loss, inputs=x, create_graph=True)", True),
        (
            "import torch",
            "torch.autograd.grad(loss, x, retain_graph=True, create_graph=True)[0].norm()",
            True,
        ),
        ("import torch", "torch.autograd.grad(loss, x)", False),
        ("import torch", "torch.autograd.grad(loss, x, create_graph=False)", False),
        ("import torch", "torch.autograd.grad(loss, x, create_graph=is_training)", False),
        ("from mine import grad", "grad(loss, x, create_graph=True)", False),
    ],
)
def test_a_gradient_of_a_gradient_is_seen(imports: str, call: str, is_seen: bool) -> None:
    facts = read_script(f"{imports}\nfor x in data:\n    penalty = {call}\n", name="train.py")
    assert bool(facts.find(Action.DIFFERENTIATE_TWICE)) == is_seen


def test_one_in_a_function_is_seen() -> None:
    source = (
        "import torch\n\ndef penalty(model, x):\n"
        "    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].norm()\n\n"
        "for x in data:\n    penalty(model, x)\n"
    )
    assert len(read_script(source, name="train.py").find(Action.DIFFERENTIATE_TWICE)) == 1
