"""The script's own variable saves adapters, as peft's model around it does."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from transformers import BertConfig, BertForSequenceClassification

from zerofit.core.strategy import Lora
from zerofit.models.changes.adapted_saving import adapted_of, redirect_saving
from zerofit.models.changes.adapters import adapt

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = torch.arange(24).reshape(2, 12)


def adapted() -> tuple[Any, Any, Any]:
    """Return a model as it was, the same with adapters that are not zero, and peft's model around it."""
    torch.manual_seed(0)
    base = BertForSequenceClassification(BertConfig(vocab_size=32, **SMALL)).eval()
    untouched = deepcopy(base)
    around = adapt(base, Lora(rank=2)).eval()
    redirect_saving(base, around)
    for one in around.parameters():
        if one.requires_grad:
            torch.nn.init.normal_(one)
    return untouched, base, around


def test_what_the_base_saves_is_read_by_peft(tmp_path: Path) -> None:
    untouched, base, around = adapted()
    base.save_pretrained(tmp_path / "plain")
    base.save_pretrained(tmp_path / "state", state_dict=base.state_dict())
    for folder in ("plain", "state"):
        assert not (tmp_path / folder / "model.safetensors").exists()
        loaded = PeftModel.from_pretrained(deepcopy(untouched), tmp_path / folder).eval()
        torch.testing.assert_close(loaded(TOKENS).logits, around(TOKENS).logits)


def test_a_copy_saves_its_own_adapters(tmp_path: Path) -> None:
    untouched, base, around = adapted()
    copy = deepcopy(base)
    expected = copy(TOKENS).logits
    torch.nn.init.zeros_(next(one for one in around.parameters() if one.requires_grad))
    copy.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(untouched, tmp_path).eval()
    torch.testing.assert_close(loaded(TOKENS).logits, expected)


def test_a_merged_model_saves_itself(tmp_path: Path) -> None:
    _, base, around = adapted()
    expected = around(TOKENS).logits
    merged = around.merge_and_unload()
    assert adapted_of(base) is None
    merged.save_pretrained(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
