"""Cut cross entropy in a trace: its logits are never there, and its gradients are."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from zerofit.core.allocation_log import CostKind, Event, Pass, TraceRequest
from zerofit.models.trace.live import trace_live

_LENGTH, _WIDTH, _WORDS = 64, 128, 4096
_REQUEST = TraceRequest(sequence_length=_LENGTH, is_padded=False, keeps_outputs=False)
_OF_2025_1 = """
def cce_linear_cross_entropy(
    e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="auto"
):
    raise AssertionError("a kernel was launched")
"""
_OF_2025_6 = """
def cce_linear_cross_entropy(
    e, c, targets, bias=None, ignore_index=-100, softcap=None, reduction="mean", shift=0, return_lse=False,
    filter_eps="auto", accum_e_fp32=False, accum_c_fp32=False, filter_e_grad=True, filter_c_grad=True,
    vocab_parallel_options=None,
):
    raise AssertionError("a kernel was launched")
"""


class _Model(nn.Module):
    """A head on embeddings, with its loss."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.options = options

    def forward(self, input_ids: Any, labels: Any) -> Any:
        loss = sys.modules["cut_cross_entropy.linear_cross_entropy"].cce_linear_cross_entropy
        found = loss(self.words(input_ids), self.head.weight, labels, **self.options)
        return {"loss": (found[0] if isinstance(found, tuple) else found).mean()}


def _made(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cut_cross_entropy.cce", "cut_cross_entropy.linear_cross_entropy"):
        module = ModuleType(name)
        exec(text, vars(module))
        monkeypatch.setitem(sys.modules, name, module)


def _log(**options: Any) -> Any:
    with torch.device("meta"):
        model = _Model(options)
    ids = torch.zeros(4, _LENGTH, dtype=torch.int64)
    trace = trace_live(model, ((), {"input_ids": ids, "labels": ids.clone()}), _REQUEST, has_tokens=True)
    return trace.log_for(3)


@pytest.mark.parametrize("text", [_OF_2025_1, _OF_2025_6])
@pytest.mark.parametrize(
    "options", [{}, {"shift": True}, {"reduction": "sum"}, {"reduction": "none", "shift": 1}]
)
def test_the_logits_of_a_cut_loss_are_never_there(
    text: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _made(text, monkeypatch)
    log = _log(**options)
    hidden_bytes, weight_bytes = 4 * _WIDTH * _LENGTH, 4 * _WIDTH * _WORDS
    assert max(log.storages.bytes_per_sample) == hidden_bytes < 4 * _WORDS * _LENGTH
    assert [log.storages.fixed_bytes[storage] for storage in log.gradient_storages] == [weight_bytes] * 2


def test_a_cut_loss_keeps_a_sum_a_token_and_a_mean_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    _made(_OF_2025_1, monkeypatch)
    assert _kept(_log(filter_eps=None)) == (_LENGTH * (4 + 8), 0)  # its sum, and where its label is
    assert _kept(_log()) == (_LENGTH * (4 + 8), 4 * _WORDS)


@pytest.mark.parametrize(("filter_eps", "products"), [("auto", 2), (None, 3)])
def test_logits_are_multiplied_once_forward_and_again_backward(
    filter_eps: str | None, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _made(_OF_2025_1, monkeypatch)
    costs = [cost for cost in _log(filter_eps=filter_eps).costs if cost.kind is CostKind.MATMUL]
    found = {cost.during: cost.fixed_flops + 3 * cost.flops_per_sample for cost in costs}
    forward = 3 * 2 * _LENGTH * _WIDTH * _WORDS
    assert found == {Pass.FORWARD: forward, Pass.BACKWARD: products * forward}


def test_the_script_has_its_own_loss_back_after_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    _made(_OF_2025_1, monkeypatch)
    _log()
    loss = sys.modules["cut_cross_entropy.linear_cross_entropy"].cce_linear_cross_entropy
    with pytest.raises(AssertionError, match="a kernel was launched"):
        loss(torch.zeros(4, _WIDTH), torch.zeros(_WORDS, _WIDTH), torch.zeros(4, dtype=torch.int64))


def _kept(log: Any) -> tuple[int, int]:
    """Return (bytes a sample, fixed bytes) of what the loss alone keeps up to the backward pass."""
    live: set[int] = set()
    for code, argument in zip(log.codes, log.arguments, strict=True):
        if code == Event.FORWARD_ENDS:
            break
        (live.add if code == Event.ALLOCATE else live.discard)(argument) if code in (0, 1) else None
    storages = log.storages
    made = [one for one in live if log.operators[storages.operators[one]] == "aten.new_empty.default"]
    return sum(storages.bytes_per_sample[one] for one in made), sum(storages.fixed_bytes[one] for one in made)
