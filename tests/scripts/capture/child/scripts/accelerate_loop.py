"""A loop of its own: groups by name, a schedule with warm-up, accumulation, clipping, saving in a finally."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
epochs = parser.parse_args().epochs

set_seed(7)
accelerator = Accelerator(gradient_accumulation_steps=3, mixed_precision="fp16", log_with="wandb")
assert accelerator.mixed_precision == "fp16"
model = AutoModelForCausalLM.from_pretrained("llama", attn_implementation="eager")
model.resize_token_embeddings(120)
model.tie_weights()
model.gradient_checkpointing_enable()
assert model.generation_config is not None
assert model.config._name_or_path == model.name_or_path == "llama"
for parameter in model.model.embed_tokens.parameters():
    parameter.requires_grad_(False)


class Samples(torch.utils.data.Dataset):
    """Twenty texts of 4 to 8 tokens, filled up to 12."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        length = 4 + index % 5
        ids = torch.full((12,), 9)
        ids[length:] = 0
        return {"input_ids": ids, "attention_mask": (torch.arange(12) < length).long(), "labels": ids}


def is_norm(name):
    return "norm" in name


trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
groups = [
    {"params": [one for name, one in trained if not is_norm(name)], "weight_decay": 0.1},
    {"params": [one for name, one in trained if is_norm(name)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=3e-4)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=5, num_training_steps=50)
loader = DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=1)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
assert scheduler.get_last_lr() == [0.0, 0.0]
accelerator.init_trackers("project")
accelerator.save_state("early")
torch.save(accelerator.unwrap_model(model).state_dict(), "early.pt")
torch.save({"prepared": torch.ones(3)}, "data.pt")
assert torch.load("data.pt")["prepared"].sum() == 3

model.train()
try:
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
finally:
    print("the script went on")
    model.generate(batch["input_ids"])
    model.save_pretrained("late")
