"""A Trainer that goes on from a checkpoint, on adapters that were trained before."""

import json
from pathlib import Path

import safetensors.torch
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

adapter = Path("adapter")
adapter.mkdir()
said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
(adapter / "adapter_config.json").write_text(json.dumps(said))
place = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
weights = {
    place.format(layer, part): torch.ones(*size)
    for layer in (0, 1)
    for part, size in zip("AB", ((2, 32), (32, 2)), strict=True)
}
(adapter / "adapter_model.safetensors").write_bytes(safetensors.torch.save(weights))
checkpoint = Path("out", "checkpoint-2")
checkpoint.mkdir(parents=True)
state = {"global_step": 2, "max_steps": 9, "num_train_epochs": 3, "train_batch_size": 2, "epoch": 0.6}
(checkpoint / "trainer_state.json").write_text(json.dumps(state))

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("llama"), "adapter", is_trainable=True)
rows = [{"input_ids": torch.ones(9).long(), "labels": torch.ones(9).long()} for _ in range(6)]
arguments = TrainingArguments("out", per_device_train_batch_size=2, num_train_epochs=3, report_to=[])
Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=True)
