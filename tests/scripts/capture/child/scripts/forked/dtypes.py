"""Data types of weights: what the config says, what a checkpoint holds, what the script asks for."""

import json
from pathlib import Path

import safetensors.torch
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
)

checkpoint = Path("checkpoint")
checkpoint.mkdir()
config = json.loads(Path("bert/config.json").read_text())
(checkpoint / "config.json").write_text(json.dumps(config))
weights = {"cls.predictions.bias": torch.zeros(100, dtype=torch.float16)}
(checkpoint / "model.safetensors").write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))

made = {
    "as the config says": LlamaForCausalLM.from_pretrained("llama"),
    "as the checkpoint holds": AutoModelForMaskedLM.from_pretrained("checkpoint"),
    "as nothing says": AutoModelForMaskedLM.from_pretrained("bert"),
    "as asked": AutoModelForCausalLM.from_pretrained("llama", dtype=torch.float16),
    "as asked of old": AutoModelForCausalLM.from_pretrained("llama", torch_dtype="float32"),
    "made directly": BertForMaskedLM(BertConfig(**config)),
    "made and halved": BertForMaskedLM(BertConfig(**config)).half().cuda(),
}
assert all(one.is_meta for model in made.values() for one in model.parameters())
print(json.dumps({name: str(model.dtype) for name, model in made.items()}))
