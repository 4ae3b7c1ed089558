"""The small models, of real transformers classes, and their inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sharded.cases import BATCH, LENGTH

if TYPE_CHECKING:
    from sharded.cases import Case

_RANK = 8
_LLAMA: dict[str, Any] = {
    "vocab_size": 4000,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "use_cache": False,
}
_ODD = {
    "vocab_size": 4001,
    "hidden_size": 252,
    "intermediate_size": 689,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
"""Sizes that no number of ranks divides."""


def make_model(case: Case) -> Any:
    """Return the case's model, as a script has it before it calls prepare()."""
    import transformers

    torch.manual_seed(0)
    config, kind = _config(case.model)
    dtype = getattr(torch, case.weights)
    model: Any = getattr(transformers, kind)._from_config(config, attn_implementation="eager", dtype=dtype)
    model.train()
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, parameter in model.named_parameters():
        if any(part in name for part in case.frozen):
            parameter.requires_grad_(False)
    return _adapted(case, model) if case.trains_adapters else model


def _config(name: str) -> tuple[Any, str]:
    import transformers

    if name == "gpt2":
        sizes = {"n_embd": 240, "n_layer": 3, "n_head": 6, "vocab_size": 4000, "n_positions": 128}
        return transformers.GPT2Config(**sizes, use_cache=False), "GPT2LMHeadModel"
    if name == "bert":
        sizes = {"hidden_size": 240, "intermediate_size": 960, "num_hidden_layers": 3, "vocab_size": 4000}
        config = transformers.BertConfig(**sizes, num_attention_heads=6, max_position_embeddings=128)
        return config, "BertForSequenceClassification"
    if name == "qwen3":
        return transformers.Qwen3Config(**_LLAMA, head_dim=32), "Qwen3ForCausalLM"
    more = _ODD if name == "odd" else {}
    config = transformers.LlamaConfig(**{**_LLAMA, **more}, tie_word_embeddings=name == "llama-tied")
    return config, "LlamaForCausalLM"


def _adapted(case: Case, model: Any) -> Any:
    """Return the model with peft's adapters in fp32, for nf4 over zerofit's stand-ins for packed layers."""
    import peft

    from zerofit.core.allocation_log import Packing
    from zerofit.core.strategy import Precision
    from zerofit.models.trace.packed import pack_linear_layers
    from zerofit.models.trace.prepare import replaceable_parameters

    if case.qlora:
        pack_linear_layers(model, Packing(stored_in=Precision.BF16))
    targets = ["c_attn"] if case.model == "gpt2" else ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=_RANK, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=False)
    with replaceable_parameters():  # fake tensors can't be swapped
        adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def make_inputs(case: Case) -> dict[str, Any]:
    """Return one micro-batch."""
    tokens = torch.randint(5, 3999, (BATCH, LENGTH))
    labels = torch.zeros(BATCH, dtype=torch.long) if case.model == "bert" else tokens
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
