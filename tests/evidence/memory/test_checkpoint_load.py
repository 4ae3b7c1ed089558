"""from_pretrained maps a checkpoint: its pages are shared, and only a change of type makes a private copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_MAKE = """
import sys, torch, transformers
config = transformers.LlamaConfig(
    vocab_size=8000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=8, use_cache=False, tie_word_embeddings=False)
model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
model.save_pretrained(sys.argv[1])
"""
_LOAD = """
import sys, torch, transformers.models.llama.modeling_llama
from transformers import AutoModelForCausalLM

def held():
    lines = open("/proc/self/status").read().splitlines()
    found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)
             if name in ("RssAnon", "RssFile")}
    return found["RssAnon"] * 1024, found["RssFile"] * 1024

AutoModelForCausalLM.from_config(transformers.LlamaConfig(  # loads what else from_pretrained needs
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
before = held()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
for parameter in model.parameters():
    parameter.view(torch.uint8).max()
after = held()
print(sum(p.numel() for p in model.parameters()), after[0] - before[0], after[1] - before[1])
"""


@pytest.mark.evidence
@pytest.mark.parametrize(
    ("dtype", "private", "mapped"), [("bfloat16", 0, 2), ("float32", 4, 0), ("float16", 2, 0)]
)
def test_bytes_of_a_parameter_after_loading(tmp_path: Path, dtype: str, private: int, mapped: int) -> None:
    subprocess.run([sys.executable, "-c", _MAKE, str(tmp_path)], check=True)
    said = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path), dtype], check=True, capture_output=True, text=True
    ).stdout
    num_elements, *grown = (int(word) for word in said.split()[-3:])
    assert [size / num_elements for size in grown] == pytest.approx([private, mapped], abs=0.35)
