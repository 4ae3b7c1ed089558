"""What ranks can't do in step is refused by its name: settings, separate experts, another generate()."""

from __future__ import annotations

from typing import Any

import pytest
from random_cases import Family
from tiny_models import make_model

from zerofit.core.errors import UserError
from zerofit.generation.call_settings import read_settings
from zerofit.generation.lockstep import OUT_OF_STEP, check_experts, goes_out_of_step, settings_in_step


def _model() -> Any:
    return make_model(Family.GPT2, is_tied=True, weight_seed=0)


def _refused(model: Any, **settings: Any) -> str | None:
    """Return what is found out of step; None where all is in step."""
    call = read_settings(model, None, given=None, settings={"max_new_tokens": 3, **settings})
    try:
        settings_in_step(call, model)
    except UserError as error:
        return error.found.removesuffix(", with weights partitioned by ZeRO-3")
    return None


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"guidance_scale": 1.0}, None),
        ({"token_healing": True}, "token_healing"),
        ({"use_mtp": False}, None),
        ({"assistant_early_exit": 1}, "assistant_early_exit"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size"),
        ({"custom_generate": "transformers-community/dola"}, "custom_generate"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups"),
        ({"num_beams": 4, "do_sample": True}, None),
        ({"prompt_lookup_num_tokens": 3}, None),
        ({"cache_implementation": "static"}, None),
    ],
)
def test_settings_that_make_passes_of_their_own_are_named(
    settings: dict[str, Any], found: str | None
) -> None:
    assert _refused(_model(), **settings) == found


def test_only_the_paged_cache_is_continuous_batching() -> None:
    values = ("paged", "static", None)
    assert [goes_out_of_step("cache_implementation", value) for value in values] == [True, False, False]


def test_every_setting_says_why() -> None:
    assert all(OUT_OF_STEP.values())


def test_a_generate_of_an_instances_own_is_not_taken_for_that_of_transformers() -> None:
    model = _model()
    model.generate = lambda *_, **__: None
    assert _refused(model) == f"{type(model).__name__}, which has its own generate()"


_SMALL = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 1, "num_experts": 2}


def _switch() -> Any:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    layers = {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_decoder_layers": 2}
    config = SwitchTransformersConfig(**_SMALL, **layers, num_sparse_decoder_layers=1)
    return SwitchTransformersForConditionalGeneration(config)


def _nllb() -> Any:
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    sizes = {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "num_experts": 2}
    sparse = {"encoder_sparse_step": 1, "decoder_sparse_step": 1}
    config = NllbMoeConfig(vocab_size=16, d_model=8, **sizes, **heads, **sparse)
    return NllbMoeForConditionalGeneration(config)


def _listed() -> Any:
    import torch

    model = _model()
    model.transformer.h[0].experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    return model


@pytest.mark.parametrize(
    ("make", "experts", "around"),
    [
        (_switch, "encoder.block.1.layer.1.mlp.experts", "SwitchTransformersSparseMLP"),
        (_nllb, "model.encoder.layers.0.ffn.experts", "NllbMoeSparseMLP"),
        (_listed, "transformer.h.0.experts", "GPT2Block"),
    ],
)
def test_separate_experts_are_refused_until_their_block_is_a_leaf(
    make: Any, experts: str, around: str
) -> None:
    model = make()
    with pytest.raises(UserError) as error:
        check_experts(model, found_at="train.py:3: ")
    assert error.value.rule == "generate-experts-apart"
    assert error.value.found == f"train.py:3: {experts}, with weights partitioned by ZeRO-3"
    for module in model.modules():
        if type(module).__name__ == around:
            module._z3_leaf = True  # as deepspeed.utils.set_z3_leaf_modules() marks it
    check_experts(model)


def test_experts_in_one_weight_are_gathered_together() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 2}
    config = MixtralConfig(vocab_size=16, **sizes, num_attention_heads=1, num_key_value_heads=1)
    check_experts(MixtralForCausalLM(config))
