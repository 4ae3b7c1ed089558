"""What is refused before DeepSpeed cuts a model, and what counts once; test_tensor_parallel.py launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refusal

from zerofit.core.checkpoints import tensor_parallel_size_of
from zerofit.training.saving.whole_saving import tie
from zerofit.training.setup.deepspeed.tensor_groups import check_model


def _model(model_type: str, **fields: Any) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4} if model_type == "gpt2" else sizes
    config = AutoConfig.for_model(model_type, vocab_size=64, **{**sizes, **fields})
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("llama", {"attention_dropout": 0.1}),
        ("llama", {"num_key_value_heads": 1}),
        ("qwen2", {}),
        ("mistral", {"num_key_value_heads": 2}),
        ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64}),
    ],
)
def test_a_model_that_deepspeed_can_cut_passes(model_type: str, fields: dict[str, Any]) -> None:
    check_model(_model(model_type, **fields), size=2)


@pytest.mark.parametrize(
    ("model_type", "fields", "rule", "found"),
    [
        ("gpt2", {}, "tensor-parallel-model", "GPT2LMHeadModel over 2 tensor-parallel ranks"),
        (
            "phi3",
            {"pad_token_id": 0},
            "tensor-parallel-model",
            "Phi3ForCausalLM over 2 tensor-parallel ranks",
        ),
        (
            "llama",
            {"attention_dropout": 0.1, "num_key_value_heads": 1},
            "tensor-parallel-uneven-dropout",
            "1 key-value heads over 2 ranks, attention_dropout=0.1",
        ),
    ],
)
def test_a_model_that_would_fail_or_train_something_else_is_refused(
    model_type: str, fields: dict[str, Any], rule: str, found: str
) -> None:
    refused = refusal(check_model, _model(model_type, **fields), size=2)
    assert (refused.rule, refused.found) == (rule, found)


def test_a_model_with_adapters_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(_model("llama"), LoraConfig(target_modules=["q_proj"]))
    assert refusal(check_model, adapted, size=2).rule == "tensor-parallel-adapters"


def test_tied_weights_become_one_tensor_of_a_state_dict_again() -> None:
    model = _model("llama", tie_word_embeddings=True)
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tie(gathered, model)
    assert gathered["lm_head.weight"] is gathered["model.embed_tokens.weight"]
    assert len({id(tensor) for tensor in gathered.values()}) == len(gathered) - 1


@pytest.mark.parametrize(
    ("names", "size"),
    [
        ([], 1),
        (["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"], 1),
        (["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"], 2),
        ([f"zero_pp_rank_{rank}_mp_rank_0{part}_model_states.pt" for rank in (0, 1) for part in range(4)], 4),
    ],
)
def test_a_checkpoints_files_tell_over_how_many_ranks_layers_were_cut(names: list[str], size: int) -> None:
    assert tensor_parallel_size_of(names) == size
