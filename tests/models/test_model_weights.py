"""What the safetensors files beside a config.json tell: the dtype that it does not name, and sizes."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from zerofit.models.find import probe_model

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.core.facts import ModelFacts

_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 10,
}


def _facts(folder: Path, *dtypes: str, config: dict[str, Any] | None = None) -> ModelFacts:
    """Return the facts of a model whose folder has a safetensors file with a tensor of each dtype."""
    if dtypes:
        tensors = {
            f"tensor{number}": torch.zeros(2, dtype=getattr(torch, dtype))
            for number, dtype in enumerate(dtypes)
        }
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **(config or {})}))
    return probe_model(str(folder), is_fast=True).facts


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("bfloat16",), "bfloat16"),
        (("float16", "float16"), "float16"),
        (("int64", "float32"), "float32"),
        (("int8",), ""),
        ((), ""),
    ],
)
def test_dtype_of_the_first_floating_tensor(tmp_path: Path, dtypes: tuple[str, ...], expected: str) -> None:
    assert _facts(tmp_path, *dtypes).checkpoint_dtype == expected


def test_a_broken_header_is_no_dtype(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")
    assert _facts(tmp_path).checkpoint_dtype == ""


def test_the_dtype_of_the_config_comes_first(tmp_path: Path) -> None:
    assert _facts(tmp_path, "float16", config={"dtype": "bfloat16"}).checkpoint_dtype == "bfloat16"
