"""A model that nobody prepared, and whose parts are called one by one; a tracker, the hub."""

from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset
from huggingface_hub import HfApi
from transformers import BertConfig

calls = "def init(**kwargs):\n    raise SystemExit('wandb was called')\n\n\nconfig = None\n"
Path("wandb.py").write_text(calls)
import wandb  # noqa: E402

wandb.init(project="mine")
wandb.config.update({"lr": 0.1})
assert HfApi().create_repo("me/model").repo_id == "me/model"
HfApi().upload_folder(repo_id="me/model", folder_path=".")
BertConfig().push_to_hub("me/model")
Dataset.from_list([{"a": 1}]).push_to_hub("me/data")

accelerator = Accelerator()
net = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 2)})
optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
for batch in torch.utils.data.DataLoader(torch.rand(6, 4), batch_size=3):
    accelerator.backward(net["head"](net["body"](batch)).sum())
    optimizer.step()
