"""Modules of which ranks call other parts: found by their structure, and gathered whole under ZeRO-3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zerofit.training.deepspeed.expert_modules import modules_that_choose


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


class _Mixture(nn.Module):
    """As remote code of DeepSeek and Qwen has it: a list of experts, and a router beside it."""

    def __init__(self, num_experts: int = 4, outputs: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(8, outputs)
        self.experts = nn.ModuleList(_Expert() for _ in range(num_experts))


class _Called(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["0"](x)


class _Heads(nn.Module):
    """One head for each task, on a body that is larger than they are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.heads = nn.ModuleDict({"a": nn.Linear(64, 2), "b": nn.Linear(64, 2)})


def _switch() -> Any:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4}
    config = SwitchTransformersConfig(
        vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=4, **sparse
    )
    return SwitchTransformersForConditionalGeneration(config)


def _nllb() -> Any:
    from transformers import NllbMoeConfig, NllbMoeModel

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_experts": 4}
    sizes = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 32}
    return NllbMoeModel(NllbMoeConfig(**layers, **heads, **sizes))


def _qwen() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 4}
    return Qwen3MoeModel(Qwen3MoeConfig(vocab_size=32, num_experts=4, **sizes, **heads))


def _bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=32, num_hidden_layers=3, num_labels=3, **sizes)
    )


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (_Mixture, ["_Mixture"]),
        (lambda: nn.ModuleList([_Mixture(), _Mixture()]), ["_Mixture", "_Mixture"]),
        (lambda: _Mixture(outputs=3), []),
        (lambda: _Mixture(num_experts=1, outputs=1), []),
        (lambda: nn.Sequential(_Called({"0": _Expert(), "1": _Expert()})), ["_Called"]),
        (_Heads, []),
        (_switch, ["SwitchTransformersExperts"] * 2),
        (_nllb, ["NllbMoeExperts"] * 2),
        (_qwen, []),
        (_bert, []),
    ],
)
def test_experts_are_found_by_structure(make: Any, found: list[str]) -> None:
    assert [type(one).__name__ for one in modules_that_choose(make())] == found
