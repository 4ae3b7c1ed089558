"""The two small models, of real transformers classes, and their inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memory.cases import BATCH

if TYPE_CHECKING:
    from memory.cases import Case

LORA_RANK = 16
TRAINS_WHEN_FROZEN = ("q_proj", "v_proj", "query", "value")


def make_model(case: Case) -> torch.nn.Module:
    """Return the case's model in fp32 on the host, as a script has it before the engine starts."""
    import transformers

    torch.manual_seed(0)
    if case.model == "llama":
        config: Any = transformers.LlamaConfig(
            vocab_size=4000, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=64,
            tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
        model: torch.nn.Module = transformers.LlamaForCausalLM._from_config(
            config,
            attn_implementation="sdpa" if max(case.tensor, case.sequence, case.pipeline) > 1 else "eager",
            dtype=torch.float32,
        )
    else:
        config = transformers.BertConfig(
            vocab_size=6000, hidden_size=240, intermediate_size=960, num_hidden_layers=4,
            num_attention_heads=6, max_position_embeddings=64, num_labels=3,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification._from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    model.train()
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if case.frozen:
        for name, param in model.named_parameters():
            param.requires_grad_(any(part in name for part in TRAINS_WHEN_FROZEN))
    if case.lora:
        return _adapted(case, model)
    return model


def _adapted(case: Case, model: torch.nn.Module) -> torch.nn.Module:
    """Return the model with peft's adapters, which peft makes in fp32 beside a base in 16 bit."""
    import peft

    if case.bf16 and not case.zero_init:
        model.to(torch.bfloat16)
    config = peft.LoraConfig(r=LORA_RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted: torch.nn.Module = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    return adapted


def make_inputs(case: Case, device: torch.device, *, rows: int = BATCH) -> dict[str, torch.Tensor]:
    """Return one micro-batch, or a batch of more rows."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 3999, (rows, case.length), generator=generator)
    labels = tokens if case.model == "llama" else torch.zeros(rows, dtype=torch.long)
    return {
        "input_ids": tokens.to(device),
        "attention_mask": torch.ones_like(tokens).to(device),
        "labels": labels.to(device),
    }
