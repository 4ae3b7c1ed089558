"""A checkpoint that GPTQ quantized, whose library is not needed to plan, adapted by peft."""

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("llama-gptq", device_map={"": 0})
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).train()
accelerator = Accelerator(mixed_precision="bf16")
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
ids = torch.ones(2, 8).long()
loader = torch.utils.data.DataLoader([{"input_ids": one, "labels": one} for one in ids], batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
