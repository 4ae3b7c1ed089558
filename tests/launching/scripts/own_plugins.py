"""Brings its own DeepSpeedPlugin and accumulation, and prints what became of them."""

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import GradientAccumulationPlugin

own = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 4,
}
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=own),
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4),
)
model = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters()),
    torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4),
)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
settings = accelerator.state.deepspeed_plugin.deepspeed_config
print("stage", settings["zero_optimization"]["stage"], settings["gradient_accumulation_steps"])
print("steps", model.global_steps)
