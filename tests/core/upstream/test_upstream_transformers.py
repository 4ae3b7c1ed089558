"""transformers under the names that zerofit has for it, in whichever release is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from zerofit.core.upstream.checkpointing import disable_checkpointing, enable_checkpointing, is_checkpointing
from zerofit.core.upstream.transformers import (
    checkpoint_every,
    checkpointed_blocks,
    field_names,
    leave_weights_unread,
    take_every_n_layers,
)

if TYPE_CHECKING:
    from pathlib import Path


def llama(**sizes: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, **sizes}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=4, **sizes))


def test_checkpointing_is_switched_on_and_off() -> None:
    model = llama()
    assert not is_checkpointing(model)
    enable_checkpointing(model, use_reentrant=False)
    assert is_checkpointing(model)
    assert all(block.gradient_checkpointing for block in checkpointed_blocks(model))
    disable_checkpointing(model)
    assert not is_checkpointing(model)


def test_a_llamas_blocks_recompute_by_a_switch_of_their_own() -> None:
    model = llama()
    assert checkpointed_blocks(model) == tuple(model.model.layers)
    assert checkpoint_every(model, 3) == (2, 4)
    assert [block.gradient_checkpointing for block in model.model.layers] == [True, False, False, True]


def test_trainer_reaches_every_second_block(tmp_path: Path) -> None:
    model = llama()
    take_every_n_layers(model)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no"
    )
    for name, value in {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    }.items():
        for field in field_names(arguments, name):
            setattr(arguments, field, value)
    tokens = torch.arange(8)
    data = [{"input_ids": tokens, "labels": tokens}] * 8
    Trainer(model=model, args=arguments, train_dataset=data).train()
    assert [block.gradient_checkpointing for block in model.model.layers] == [True, False, True, False]


def test_a_field_has_the_name_that_the_release_reads() -> None:
    made = TrainingArguments(use_cpu=True, gradient_checkpointing=True)
    assert getattr(made, field_names(made, "activation_checkpointing")[0]) is True
    assert field_names(made, "bf16") == ("bf16",)
    assert field_names(made, "no_such_field") == ()


@pytest.mark.parametrize("is_tied", [True, False])
def test_from_pretrained_reads_no_weights(tmp_path: Path, is_tied: bool) -> None:
    class Unread(LlamaForCausalLM):
        pass

    llama(tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    leave_weights_unread(Unread)
    model, report = Unread.from_pretrained(tmp_path, output_loading_info=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is is_tied
    assert not LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight.is_meta
