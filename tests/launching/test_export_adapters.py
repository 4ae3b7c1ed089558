"""Adapters are exported on the model that their checkpoint, or their own configuration, describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zerofit.core.checkpoints import MODEL_FOLDER
from zerofit.core.errors import UserError
from zerofit.launching.export import export


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path]:
    """Return a model with adapters, and the checkpoint of them that Trainer writes: without config.json."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    base.config.architectures = ["LlamaForCausalLM"]
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    checkpoint = tmp_path / "checkpoint-1"
    model.save_pretrained(checkpoint)
    (checkpoint / "trainer_state.json").write_text('{"global_step": 1}')
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, checkpoint / name)
    return model, checkpoint


def _is_same(folder: Path, checkpoint: Path) -> bool:
    from safetensors.torch import load_file

    name = "adapter_model.safetensors"
    written, known = load_file(folder / name), load_file(checkpoint / name)
    return written.keys() == known.keys() and all(written[key].equal(known[key]) for key in known)


def test_the_base_model_may_be_described_beside_the_checkpoint(
    saved: tuple[Any, Path], tmp_path: Path
) -> None:
    model, checkpoint = saved
    model.get_base_model().config.save_pretrained(checkpoint / MODEL_FOLDER)
    assert export(checkpoint, tmp_path / "out").is_adapter
    assert _is_same(tmp_path / "out", checkpoint)


def test_the_base_model_may_be_one_that_the_adapters_name(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = saved
    model.get_base_model().config.save_pretrained(tmp_path / "base")
    _name_base(checkpoint, str(tmp_path / "base"))
    assert export(checkpoint, tmp_path / "out").is_adapter
    assert _is_same(tmp_path / "out", checkpoint)


@pytest.mark.parametrize(
    ("base", "found"),
    [
        ("", "its adapter_config.json names no base model, and it has no config.json"),
        ("no/model", "the base model no/model of its adapter_config.json can't be read ("),
    ],
)
def test_adapters_without_a_base_model_are_refused(
    base: str, found: str, saved: tuple[Any, Path], tmp_path: Path
) -> None:
    _, checkpoint = saved
    _name_base(checkpoint, base)
    with pytest.raises(UserError) as error:
        export(checkpoint, tmp_path / "out")
    assert error.value.rule == "export-without-model"
    assert error.value.found is not None
    assert found in error.value.found
    assert not (tmp_path / "out").exists()


def _name_base(checkpoint: Path, base: str) -> None:
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(checkpoint))
    config.base_model_name_or_path = base
    config.save_pretrained(str(checkpoint))
