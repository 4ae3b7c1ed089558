"""Modules of which ranks call other parts: found by their structure, and gathered whole under ZeRO-3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerators import quiet, settings, wrap_all
from refusals import refusal
from torch import nn

from zerofit.core.plan import Topology
from zerofit.core.strategy import ZeroStage
from zerofit.training.setup.deepspeed.expert_modules import engine_wrappers, modules_that_choose


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x))
        return y


class _GatedExpert(_Expert):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(8, 16)


class _Mixture(nn.Module):
    """As remote code of DeepSeek and Qwen has it: a list of experts, and a router beside it."""

    def __init__(self, num_experts: int = 4, outputs: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(8, outputs)
        self.experts = nn.ModuleList(_GatedExpert() for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send all samples to the first expert."""
        chosen: torch.Tensor = self.experts[0](self.gate(x) @ torch.ones(4, 8))
        return chosen


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


def _adapted(*targets: str) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(nn.Sequential(_Mixture()), LoraConfig(r=2, target_modules=list(targets)))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (_Mixture, ["_Mixture"]),
        (lambda: _adapted("up", "down", "gate_proj"), ["_Mixture"]),
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


class _Engine:
    """In the place of DeepSpeed's, which hooks a model in the same call."""

    def __init__(self, args: Any, model: Any) -> None:
        self.model = model


@pytest.mark.parametrize(
    ("make", "ends"),
    [(_Mixture, True), (lambda: _adapted("up"), True), (lambda: _adapted("gate"), False)],
    ids=["whole", "adapters of experts", "adapters beside frozen experts"],
)
def test_a_step_that_leaves_a_training_expert_out_ends_the_run_at_stage_2(
    make: Any, monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    wanted = settings(uses_deepspeed=True, zero_stage=ZeroStage.GRADIENTS)
    wanted = replace(wanted, plan=replace(wanted.plan, topology=Topology(world_size=2, on_cpu=True)))
    monkeypatch.setattr(_Engine, "__init__", _Engine.__init__)
    wrap_all(_Engine, engine_wrappers(_Engine, wanted, quiet()))
    model = _Engine(None, make()).model
    with torch.no_grad():
        model(torch.ones(2, 8))  # evaluates, and leaves no gradients
    if not ends:
        model(torch.ones(2, 8))
        return
    error = refusal(model, torch.ones(2, 8))
    assert (error.rule, error.found) == (
        "unlike-gradients",
        "_Mixture: samples were routed to 1 of 4 experts",
    )
