"""A loss that writes by Triton kernels, as Liger's does: traced without a GPU, its logits are never whole."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # which asks for Triton when it is imported, and is not to find the one made below
from torch import nn

from zerofit.core.allocation_log import CostKind, Pass, TraceRequest
from zerofit.core.errors import UserError
from zerofit.models.trace.live import trace_live

_LENGTH, _WIDTH, _WORDS = 64, 32, 1024
_REQUEST = TraceRequest(sequence_length=_LENGTH, is_padded=False, keeps_outputs=False)
_LIGER = """
import torch, triton
from triton.runtime.jit import KernelInterface

class Kernel(KernelInterface):
    def run(self, *args, **kwargs):
        raise AssertionError("a kernel was launched")

kernel = Kernel()

class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels):
        BT, H = hidden.shape
        inc_factor = triton.cdiv(weight.shape[0], H)
        chunk_size = triton.next_power_of_2(triton.cdiv(BT, inc_factor))
        num_labels = (labels != -100).sum().item()
        gradient = torch.zeros_like(hidden)
        for start in range(0, BT, chunk_size):
            logits = hidden[start : start + chunk_size] @ weight.t()
            kernel[(chunk_size,)](logits, num_labels)
            gradient[start : start + chunk_size] = logits @ weight
        ctx.save_for_backward(gradient)
        return gradient.sum()

    @staticmethod
    def backward(ctx, incoming):
        (gradient,) = ctx.saved_tensors
        if not torch.equal(incoming, torch.tensor(1.0)):
            kernel[(1,)](gradient, incoming)
        return gradient, None, None
"""
"""The parts of Liger 0.8.5's fused_linear_cross_entropy that decide what is allocated."""


class _Model(nn.Module):
    """A head on embeddings, with its loss."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.head.weight.requires_grad_(False)
        self.loss = loss

    def forward(self, input_ids: Any, labels: Any) -> Any:
        hidden = self.words(input_ids).flatten(0, 1)
        return {"loss": self.loss(hidden, self.head.weight, labels.flatten())}


def _whole(hidden: Any, weight: Any, labels: Any) -> Any:
    return nn.functional.cross_entropy(hidden @ weight.t(), labels)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a loss of a module named as Liger's, on a Triton of four functions."""
    triton, jit, liger = (
        ModuleType(name) for name in ("triton", "triton.runtime.jit", "liger_kernel.ops.fused")
    )

    class KernelInterface:
        def __getitem__(self, grid: Any) -> Any:
            return self.run  # type: ignore[attr-defined]

    vars(triton).update(cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    vars(jit).update(KernelInterface=KernelInterface)
    for module in (triton, ModuleType("triton.runtime"), jit, liger):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(_LIGER, vars(liger))
    return liger.Loss.apply


def _trace(loss: Any) -> Any:
    with torch.device("meta"):
        model = _Model(loss)
    ids = torch.zeros(4, _LENGTH, dtype=torch.int64)
    return trace_live(model, ((), {"input_ids": ids, "labels": ids.clone()}), _REQUEST, has_tokens=True)


@pytest.mark.slow
def test_logits_are_whole_in_the_models_own_loss_and_in_pieces_in_the_fused_one(fused: Any) -> None:
    logits_bytes = _LENGTH * _WORDS * 4
    for samples in (1, 3, 24):
        assert max(_trace(_whole).log_for(samples).storages.bytes_per_sample) == logits_bytes
        # Liger's rule: as many pieces as the logits are wider than the hidden states, here 1024 / 32.
        assert max(_trace(fused).log_for(samples).storages.bytes_per_sample) == logits_bytes // 32


def test_a_kernel_takes_the_time_of_moving_its_tensors_once(fused: Any) -> None:
    log = _trace(fused).log_for(4)
    (kernel,) = [cost for cost in log.costs if cost.operator == "triton.kernel"]
    assert (kernel.kind, kernel.during) == (CostKind.MEMORY, Pass.FORWARD)
    moved = kernel.count * (kernel.fixed_bytes + 4 * kernel.bytes_per_sample)
    assert moved == 4 * _LENGTH * _WORDS * 4  # all logits


def test_kernels_run_again_after_a_trace(fused: Any) -> None:
    _trace(fused)
    with pytest.raises(AssertionError, match="a kernel was launched"):
        fused(torch.zeros(4, _WIDTH), torch.zeros(_WORDS, _WIDTH), torch.zeros(4, dtype=torch.int64))


def test_values_are_asked_of_as_before_by_a_script_itself(fused: Any) -> None:
    def checked(hidden: Any, weight: Any, labels: Any) -> Any:
        assert not torch.equal(labels, labels)
        return _whole(hidden, weight, labels)

    with pytest.raises(UserError, match="can't run on fake tensors"):
        _trace(checked)
