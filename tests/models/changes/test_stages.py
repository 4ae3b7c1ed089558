"""Stages of a model, run one after another in one process, against the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from zerofit.core.errors import UserError
from zerofit.models.changes.stages import (
    as_stage,
    blocks_by_stage,
    check_stages,
    cut,
    modules_replaced,
    run_stage,
    share_blocks,
)

if TYPE_CHECKING:
    from torch.nn import Module

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 32}
_MODELS: dict[str, dict[str, Any]] = {
    "cohere": {"num_key_value_heads": 2},
    "falcon": {},  # whose blocks return tuples, as those of many models do in transformers 5.0
    "gemma": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": {},
    "granite": {"num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 2},
    "olmo2": {"num_key_value_heads": 2},
    "phi": {},
    "phi3": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen2_moe": {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "stablelm": {"num_key_value_heads": 2},
}
_NO_PIPELINES = {
    "bert": ({"is_decoder": True}, "it is not a stack of equal blocks between embeddings and a head"),
    "bloom": ({"n_layer": 5, "n_head": 4}, "word_embeddings_layernorm changes the embeddings"),
    "opt": ({"ffn_dim": 64, "word_embed_proj_dim": 32}, "it is not a stack of equal blocks"),
}


def _model(kind: str, **fields: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64} if kind.startswith("gpt2") or kind == "gpt_bigcode" else _SMALL
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **fields}))


@pytest.mark.parametrize("kind", _MODELS)
def test_stages_give_the_logits_of_the_whole_model(kind: str) -> None:
    model = _model(kind, **_MODELS[kind])
    check_stages(model, share_blocks(model, 3))


@pytest.mark.parametrize("kind", _NO_PIPELINES)
def test_a_model_whose_stages_are_something_else_is_refused(kind: str) -> None:
    fields, why = _NO_PIPELINES[kind]
    model = _model(kind, **fields)
    with pytest.raises(UserError, match="can't be split into pipeline stages") as refused:
        check_stages(model, share_blocks(model, 2))
    assert why in str(refused.value)


def test_stages_that_compute_something_else_are_noticed() -> None:
    """A model that scales what it is given: every stage behind the first scales the hidden states again."""
    model = _model("llama", **_MODELS["llama"])
    plain = model.model.forward
    model.model.forward = lambda input_ids=None, inputs_embeds=None, **more: plain(
        inputs_embeds=2 * (model.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds),
        **more,
    )
    with pytest.raises(UserError, match="the logits of its stages differ from the whole model's"):
        check_stages(model, share_blocks(model, 2))


@pytest.mark.parametrize(
    ("num_blocks", "vocabulary", "num_stages", "stages"),
    [
        (4, 64, 2, "0-1, 2-3"),
        (5, 64, 2, "0-2, 3-4"),
        (8, 64, 3, "0-2, 3-5, 6-7"),
        (6, 64, 6, "0, 1, 2, 3, 4, 5"),
        (8, 2048, 2, "0-6, 7"),  # a head of some ten blocks
    ],
)
def test_the_costliest_stage_is_as_cheap_as_can_be(
    num_blocks: int, vocabulary: int, num_stages: int, stages: str
) -> None:
    model = _model("llama", num_hidden_layers=num_blocks, vocab_size=vocabulary, num_key_value_heads=4)
    assert blocks_by_stage(share_blocks(model, num_stages)) == stages


def test_a_plan_says_how_many_blocks_each_stage_has() -> None:
    assert share_blocks(_model("llama"), 2, (1, 4)) == (0, 1, 5)
    with pytest.raises(UserError, match="stages of \\(1, 3\\) blocks, and LlamaForCausalLM of 5"):
        share_blocks(_model("llama"), 2, (1, 3))


def test_a_pipeline_is_not_longer_than_the_model() -> None:
    with pytest.raises(UserError, match="take at most 5 stages: a smaller --pipeline-parallel-size"):
        share_blocks(_model("llama"), 6)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_each_parameter_once_and_tied_embeddings_at_both_ends(tied: bool) -> None:
    whole = _model("llama", tie_word_embeddings=tied)
    bounds, held = share_blocks(whole, 3), []
    for stage in range(3):
        model = _model("llama", tie_word_embeddings=tied)
        cut(model, (stage,), bounds)
        held += _names(model)
    twice = ["model.embed_tokens.weight"] * tied
    assert sorted(held) == sorted([*_names(whole), *twice])


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_with_several_stages_runs_each_without_the_others(tied: bool) -> None:
    import torch

    model = _model("llama", tie_word_embeddings=tied).eval()
    tokens = torch.arange(1, 6)[None]
    expected = model(input_ids=tokens).logits
    bounds, ranks = share_blocks(model, 4), []
    for own in ((0, 2), (1, 3)):
        part = _model("llama", tie_word_embeddings=tied).eval()
        ranks.append((part, cut(part, own, bounds)))
    passed = tokens
    for stage in range(4):
        part, others = ranks[stage % 2]
        before = _names(part)
        with modules_replaced(others[stage]):
            passed = run_stage(part, part.forward, stage, 4, passed)
        assert _names(part) == before
    assert torch.equal(passed.logits, expected)


def test_a_model_is_whole_again_after_a_stage() -> None:
    model = _model("gpt2", **_GPT2)
    before = _names(model)
    with as_stage(model, 1, share_blocks(model, 3)):
        assert len(_names(model)) < len(before)
    assert _names(model) == before


def _names(model: Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]
