"""Models with sparse tensors, outputs in other containers, and sizes that are read off a buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.errors import UserError
from zerofit.models.trace.entry import describe
from zerofit.models.trace.live import prepare_live, trace_live
from zerofit.models.trace.live_batch import live_batch
from zerofit.models.trace.run import run_micro_batch

_REQUEST = TraceRequest(sequence_length=1)
_SIZE, _KEPT = 40, 7


class _Sparse(nn.Module):
    """A layer whose trained weight is sparse, as peft's FRoD has it: its size lies in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(_KEPT))
        self.register_buffer("places", torch.stack([torch.arange(_KEPT)] * 2))
        self.register_buffer("size", torch.tensor([_SIZE, _SIZE]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = tuple(int(one) for one in self.size.tolist())
        weight = torch.sparse_coo_tensor(self.places, self.values, size).coalesce()
        return torch.sparse.mm(weight, x.t()).t()


def _births(model: nn.Module, samples: int) -> dict[str, list[int]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = ((torch.zeros(4, _SIZE),), {})
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = prepare_live(model, _REQUEST)
        feed = live_batch(given, has_tokens=False, has_decoder=False, micro_batch_size=None).feed
        log = run_micro_batch(made, describe(made), samples, _REQUEST, feed=feed)
    births: dict[str, list[int]] = {}
    for operator, num_bytes in zip(log.operators, log.num_bytes, strict=True):
        births.setdefault(log.operator_names[operator].partition(".")[2], []).append(num_bytes)
    return births


@pytest.mark.parametrize("samples", [4, 9])
def test_a_sparse_weight_costs_its_elements_and_its_gradient_one_dense_matrix(samples: int) -> None:
    births = _births(_Sparse(), samples)
    places, values = 2 * _KEPT * 8, _KEPT * 4
    assert births["clone.default"][:2] == [places, values]
    assert births["_sparse_addmm.default"] == [_SIZE * samples * 4]
    assert births["mm.default"] == [_SIZE * _SIZE * 4]  # of which the elements' places are taken
    assert set(births["empty_like.default"]) == {values}


def test_a_model_of_peft_with_sparse_adapters_is_traced() -> None:
    from peft import FrodConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    base = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes))
    model = get_peft_model(base, FrodConfig(task_type="SEQ_CLS", target_modules=["query", "value"])).train()
    ids = torch.zeros(4, 8, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": ids + 1, "labels": ids[:, 0]}
    (log,) = trace_live(model, ((), batch), TraceRequest(sequence_length=8)).logs
    trained = {
        one.name: at for one, at in zip(log.parameters, log.gradient_storages, strict=True) if one.trains
    }
    assert any("frod_lambda_s" in name for name in trained)
    assert min(trained.values()) >= 0


class _Encoding(nn.Module):
    """Gives back what it is given, with its scores: a CrossEncoder of sentence_transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, features: Any) -> Any:
        from transformers import BatchEncoding

        return BatchEncoding({**features, "scores": self.net(features["x"])})


def test_outputs_in_any_container_make_a_loss() -> None:
    from transformers import BatchEncoding

    given = ((BatchEncoding({"x": torch.zeros(4, 3)}),), {})
    (log,) = trace_live(_Encoding(), given, _REQUEST, has_tokens=False).logs
    assert min(log.gradient_storages) >= 0


def test_outputs_without_a_gradient_are_refused_with_their_reason() -> None:
    class Silent(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return [super().forward(x).detach()]

    with pytest.raises(UserError) as caught:
        trace_live(Silent(3, 2), ((torch.zeros(4, 3),), {}), _REQUEST, has_tokens=False)
    assert (caught.value.rule, caught.value.found) == (
        "trace-failed",
        "outputs of list, none with a gradient",
    )
