"""Training loops as scripts have them; prints each loss and the weights' sum. Usage: loops.py WAY"""

import contextlib
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader, TensorDataset

way = sys.argv[1]
arguments = {}
if way == "own plugins":
    stage = {"stage": 1}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": stage, "gradient_clipping": 1.0}
    arguments["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config={**config, "gradient_accumulation_steps": 4})
    arguments["gradient_accumulation_plugin"] = GradientAccumulationPlugin(num_steps=4)
accelerator = Accelerator(**arguments)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
inputs = torch.randn(32, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accumulates = way in ("own plugins", "accumulate")
for step, (batch, target) in enumerate(loader):
    with accelerator.accumulate(model) if accumulates else contextlib.nullcontext():
        loss = torch.nn.functional.mse_loss(model(batch), target)
        print("loss", f"{loss.item():.6f}")
        accelerator.backward(loss / 4 if way == "by hand" else loss)
        if way == "clip once" and step == 0:
            accelerator.clip_grad_norm_(model.parameters(), 1e-3)
        if way == "torch clips":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if way == "clip":
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        if way == "by hand" and step % 4 != 3:
            continue
        if way != "no step":
            optimizer.step()
            optimizer.zero_grad()
weights = accelerator.get_state_dict(model)
print("weights", f"{sum(weight.double().abs().sum().item() for weight in weights.values()):.6f}")
if accelerator.state.deepspeed_plugin is not None:
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    print("stage", settings["zero_optimization"]["stage"], settings["gradient_accumulation_steps"])
