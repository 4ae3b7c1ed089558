"""Which lines of a script edit gradients or weights by hand, by its source."""

from __future__ import annotations

import pytest

from zerofit.scripts.capture.child.script_source import edits_by_hand

_LOOP = """\
for step, batch in enumerate(loader):
    loss = model(batch)
    accelerator.backward(loss)
    {}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[p.grad.zero_() for p in model.parameters() if p.grad is not None]", "train.py:4"),
        ("norm = sum(p.grad.norm() for p in model.parameters())", "train.py:4"),
        ("model.head.weight.grad = None", ""),
        ("loss.backward(create_graph=True)", "train.py:4"),
        ("torch.autograd.grad(loss, x)", ""),
        ("torch.autograd.grad(loss, x, create_graph=True)", "train.py:4"),
        ("accelerator.clip_grad_norm_(model.parameters(), 1.0)", ""),
        ("optimizer.zero_grad()", ""),
        ("p.grad = p.grad.sign()", "train.py:4"),
    ],
)
def test_gradients(line: str, expected: str) -> None:
    assert edits_by_hand({"/a/train.py": _LOOP.format(line)}).gradients == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("for p in model.parameters(): p.clamp_(-1, 1)", "train.py:4"),
        ("for p in model.parameters(): p.data.clamp_(-1, 1)", "train.py:4"),
        ("for e, p in zip(ema, model.parameters()): p.data.copy_(e)", "train.py:4"),
        ("for n, p in model.named_parameters(): p.data = p.data * 2", "train.py:4"),
        ("for p in model.parameters(): p.requires_grad_(False)", ""),
        ("for p in model.parameters(): total += p.numel()", ""),
        ("for e, p in zip(ema, model.parameters()): e.lerp_(p.detach(), 0.1)", "train.py:4"),
    ],
)
def test_weights_in_a_training_loop(line: str, expected: str) -> None:
    assert edits_by_hand({"/a/train.py": _LOOP.format(line)}).weights == expected


def test_weights_written_before_training_are_none() -> None:
    text = "for p in model.parameters():\n    p.data.normal_()\n" + _LOOP.format("pass")
    assert edits_by_hand({"train.py": text}).weights == ""


def test_an_optimizer_of_the_script_may_use_gradients_in_its_step() -> None:
    text = (
        "class Own(torch.optim.Optimizer):\n"
        "    def step(self):\n"
        "        for p in self.param_groups[0]['params']:\n"
        "            p.data.add_(p.grad, alpha=-1)\n"
    )
    assert edits_by_hand({"train.py": text}).gradients == ""
    assert edits_by_hand({"train.py": text.replace("step", "perturb")}).gradients == "train.py:4"


def test_what_is_no_python_is_passed_over() -> None:
    assert edits_by_hand({"cell.py": "%matplotlib inline"}).gradients == ""
