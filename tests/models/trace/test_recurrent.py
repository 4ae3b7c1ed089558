"""LSTM, GRU and plain RNN trace as cuDNN runs them, packed sequences too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zerofit.core.allocation_log import CostKind, Pass, TensorKind, TraceRequest
from zerofit.models.trace.live import trace_live

_SAMPLES, _STEPS, _WIDTH, _HIDDEN, _CLASSES = 4, 16, 32, 64, 5


class _Tagger(nn.Module):
    def __init__(self, kind: str, *, is_packed: bool, **options: Any) -> None:
        super().__init__()
        self.is_packed = is_packed
        self.words = nn.Embedding(100, _WIDTH)
        self.layers = getattr(nn, kind)(_WIDTH, _HIDDEN, batch_first=True, **options)
        self.head = nn.Linear(_HIDDEN * (2 if options.get("bidirectional") else 1), _CLASSES)

    def forward(self, input_ids: Any, lengths: Any, labels: Any) -> Any:
        hidden = self.words(input_ids)
        if self.is_packed:
            hidden = nn.utils.rnn.pack_padded_sequence(
                hidden, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
        hidden, _ = self.layers(hidden)
        if self.is_packed:
            hidden, _ = nn.utils.rnn.pad_packed_sequence(hidden, batch_first=True)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _batch() -> dict[str, Any]:
    return {
        "input_ids": torch.zeros(_SAMPLES, _STEPS, dtype=torch.int64),
        "lengths": torch.tensor([_STEPS, 12, 9, 3]),
        "labels": torch.zeros(_SAMPLES, _STEPS, dtype=torch.int64),
    }


@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "options", "gates"),
    [("LSTM", {}, 4), ("GRU", {"num_layers": 2, "bidirectional": True, "dropout": 0.1}, 3), ("RNN", {}, 1)],
)
def test_a_recurrent_model_traces(kind: str, options: dict[str, Any], gates: int, is_packed: bool) -> None:
    model = _Tagger(kind, is_packed=is_packed, **options)
    request = TraceRequest(sequence_length=_STEPS)
    trace = trace_live(model, ((), _batch()), request, micro_batch_size=_SAMPLES)
    log = trace.log_for(_SAMPLES)
    # The products with both matrices of each gate, at every step, in each direction of each layer.
    directions, layers = 1 + bool(options.get("bidirectional")), options.get("num_layers", 1)
    widths = [_WIDTH, *[_HIDDEN * directions] * (layers - 1)]
    expected = sum(2 * _STEPS * gates * _HIDDEN * (width + _HIDDEN) * directions for width in widths)
    products = [
        cost.flops_per_sample
        for cost in log.costs
        if cost.operator == "triton.kernel" and cost.kind is CostKind.MATMUL and cost.during is Pass.FORWARD
    ]
    assert products == [expected]
    assert trace.logs[-1].least_micro_batch_size == 1


def test_all_gradients_of_a_recurrent_module_are_in_one_buffer() -> None:
    model = _Tagger("LSTM", is_packed=False)
    log = trace_live(model, ((), _batch()), TraceRequest(sequence_length=_STEPS)).log_for(_SAMPLES)
    sizes = {
        parameter.name: log.storages.fixed_bytes[log.gradient_storages[number]]
        for number, parameter in enumerate(log.parameters)
    }
    assert all(log.storages.kinds[storage] is TensorKind.GRADIENT for storage in log.gradient_storages)
    of_layers = [size for name, size in sizes.items() if name.startswith("layers.")]
    assert sorted(of_layers) == [0, 0, 0, 4 * sum(weight.numel() for weight in model.layers.parameters())]
