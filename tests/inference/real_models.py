"""Small models of each kind with random weights, and their shapes as the planner sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.inference.passes import shape_of
from zerofit.probe.model_dimensions import facts_of
from zerofit.probe.model_source import ModelSizes
from zerofit.probe.model_task import Task
from zerofit.strategy import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from zerofit.estimate.closed_form_shape import Shape
    from zerofit.facts import ModelFacts

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 500},
    "llama": {
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 500,
    },
    "t5": {"d_model": 128, "d_ff": 512, "d_kv": 16, "num_layers": 2, "num_heads": 8, "vocab_size": 500},
}
"""By family: learned positions, shared key-value heads, an encoder with a position bias."""


def real_model(family: str) -> PreTrainedModel:
    """Return a model in fp32 on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(family, **CONFIGS[family], pad_token_id=0, eos_token_id=1)
    if not config.is_encoder_decoder:
        return AutoModelForCausalLM.from_config(config).eval()
    config.decoder_start_token_id = 0
    return AutoModelForSeq2SeqLM.from_config(config).eval()


def facts_of_model(model: PreTrainedModel) -> ModelFacts:
    """Return a model's facts from its config and its parameters."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    task = Task.SEQ2SEQ_LM if model.config.is_encoder_decoder else Task.CAUSAL_LM
    counted = ModelSizes(
        architecture=type(model).__name__,
        num_parameters=sum(sizes),
        num_trainable_parameters=sum(sizes),
        num_largest_layer_parameters=0,
        largest_parameter=max(sizes),
    )
    return facts_of("small", model.config.to_dict(), task, counted)


def shape_of_model(model: PreTrainedModel) -> Shape:
    """Return a model's matrices, in fp32."""
    return shape_of(facts_of_model(model), Precision.FP32)
