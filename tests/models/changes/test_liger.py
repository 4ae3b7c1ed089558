"""Liger's kernels are asked for as liger-kernel takes it; where they can't run the user is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from zerofit.core.errors import UserError
from zerofit.models.changes.liger import use_liger

_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **_SIZES))


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a package in the place of liger-kernel, with the names of its version 0.8.5 that are called."""
    folder = tmp_path / "liger_kernel" / "transformers"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(
        "def _apply_liger_kernel_to_instance(model, **kwargs):\n    model.has_liger = kwargs\n"
    )
    (folder / "monkey_patch.py").write_text("MODEL_TYPE_TO_APPLY_LIGER_FN = {'llama': None, 'qwen3': None}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def _refusal(model: Any) -> tuple[str, str]:
    with pytest.raises(UserError) as refused:
        use_liger(model)
    return refused.value.rule, refused.value.found


def test_without_the_package_it_is_refused() -> None:
    found = "Liger's kernels, and no package liger_kernel in this environment"
    assert _refusal(llama()) == ("liger-not-installed", found)


@pytest.mark.usefixtures("stub")
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a process without a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    assert _refusal(llama()) == ("liger-needs-gpu", "Liger's kernels, and no GPU in this process")


@pytest.mark.usefixtures("stub", "_gpu")
def test_a_family_without_kernels_is_refused() -> None:
    model = BertForMaskedLM(BertConfig(vocab_size=32, **_SIZES))
    found = "Liger's kernels, and BertForMaskedLM of the family bert"
    assert _refusal(model) == ("liger-family-unknown", found)


@pytest.mark.usefixtures("stub", "_gpu")
def test_the_model_inside_an_adapter_gets_them() -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    assert use_liger(model) == ("Liger's kernels run in LlamaForCausalLM",)
    assert model.base_model.model.has_liger == {}
