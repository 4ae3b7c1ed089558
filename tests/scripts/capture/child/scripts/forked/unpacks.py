"""A checkpoint in FP8, unpacked while it is loaded, of which all weights train."""

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

quantization = FineGrainedFP8Config(dequantize=True)
model = AutoModelForCausalLM.from_pretrained("llama-fp8", quantization_config=quantization).train()
accelerator = Accelerator(mixed_precision="bf16")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.ones(2, 8).long()
loader = torch.utils.data.DataLoader([{"input_ids": one, "labels": one} for one in ids], batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
