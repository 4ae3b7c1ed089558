"""The type of a model's weights where its config.json names none: that of the safetensors files beside it."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from zerofit.models.find import probe_model
from zerofit.models.safetensors_headers import stored_dtype

if TYPE_CHECKING:
    from pathlib import Path

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


def _write(folder: Path, *dtypes: str, config: dict[str, Any] | None = None) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        **{
            f"tensor{number}": {"dtype": dtype, "shape": [2], "data_offsets": [8 * number, 8 * number + 8]}
            for number, dtype in enumerate(dtypes)
        },
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **(config or {})}))


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("BF16",), "bfloat16"),
        (("F16", "F32"), "float16"),
        (("I64", "F32"), "float32"),
        (("I8",), ""),
        ((), ""),
    ],
)
def test_type_of_the_first_floating_tensor(tmp_path: Path, dtypes: tuple[str, ...], expected: str) -> None:
    _write(tmp_path, *dtypes)
    assert stored_dtype(tmp_path) == expected


def test_no_files_no_type(tmp_path: Path) -> None:
    assert stored_dtype(tmp_path) == ""


def test_a_broken_header_is_no_type(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")
    with pytest.raises(ValueError, match="no safetensors file"):
        stored_dtype(tmp_path)


@pytest.mark.parametrize(("said", "expected"), [({}, "float16"), ({"dtype": "bfloat16"}, "bfloat16")])
def test_facts_have_the_configs_type_or_else_the_weights(
    tmp_path: Path, said: dict[str, Any], expected: str
) -> None:
    _write(tmp_path, "F16", config=said)
    assert probe_model(str(tmp_path), is_fast=True).facts.checkpoint_dtype == expected
