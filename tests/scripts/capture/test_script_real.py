"""A script that looks at its weights, captured by the real process: without them, then with them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zerofit.scripts.capture.capture import capture_script

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 10,
    "dtype": "float32",
}
_SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

with open("attempts.txt", "a") as attempts:
    attempts.write("x")
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
LOOK
print("attempts", open("attempts.txt").read())
data = torch.utils.data.DataLoader([torch.tensor([1, 2, 3])] * 8, batch_size=2)
accelerator = Accelerator(cpu=True)
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
model.train()
for batch in data:
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
"""


@pytest.mark.parametrize(
    "look",
    [
        pytest.param("model.lm_head.weight.sum().item()", id="at a value", marks=pytest.mark.slow),
        pytest.param(
            "if model.lm_head.weight.is_meta: raise ValueError('wrong storage')",
            id="in a library of its own words",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_that_looks_at_its_weights_is_captured_with_them(tmp_path: Path, look: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(_CONFIG))
    (tmp_path / "train.py").write_text(_SCRIPT.replace("LOOK", look))
    with capture_script(
        ("train.py", "model"),
        environment={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        limit_s=240,
        cache_folder=tmp_path / "cache",
    ) as script:
        assert script._child is not None
        assert "attempts x" in script._child.output
        assert script.capture.stopped_at == "train.py:17"
        assert script.capture.micro_batch_size == 2
    assert not (tmp_path / "attempts.txt").exists()
