"""Trains a tiny model and tells what torch.compile did: compiled.py small|bert [FOLDER to save in].

Prints the losses of one rank without any of this and its own, the graphs that were compiled with the times
that a graph broke, and the saved names.
"""

import copy
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch._dynamo.utils import counters
from transformers import BertConfig, BertForSequenceClassification, set_seed

NUM_STEPS, BATCH_SIZE, NUM_TOKENS = 3, 4, 8


class Small(torch.nn.Module):
    """Two linear layers and their loss."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(NUM_TOKENS, 16), torch.nn.Linear(16, 3)

    def forward(self, input_ids, labels):
        outputs = self.outer(torch.relu(self.inner(input_ids.float() / 64)))
        return {"loss": torch.nn.functional.cross_entropy(outputs, labels)}


def bert():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=64, num_labels=3, **sizes, **no_dropout)
    config.use_cache = False  # else a message about it breaks the graph while activations are recomputed
    return BertForSequenceClassification(config)


def losses_in_plain_torch(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main(name, folder=None):
    accelerator = Accelerator()
    set_seed(0)
    model = {"small": Small, "bert": bert}[name]()
    random = torch.Generator().manual_seed(1)
    data = [
        {
            "input_ids": torch.randint(0, 64, (NUM_TOKENS,), generator=random),
            "labels": torch.randint(0, 3, (), generator=random),
        }
        for _ in range(NUM_STEPS * BATCH_SIZE * accelerator.num_processes)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE)
    if accelerator.num_processes == 1:
        print("plain", *losses_in_plain_torch(copy.deepcopy(model), loader))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print("loss", accelerator.reduce(loss.detach(), "mean").item(), flush=True)
    broken = sum(counters["graph_break"].values())
    accelerator.print("graphs", counters["stats"]["unique_graphs"], "broken", broken)
    if folder is not None:
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        names = sorted(accelerator.get_state_dict(model))
        accelerator.print("kind", type(accelerator.unwrap_model(model)).__name__)
        Path(folder, "names.json").write_text(json.dumps(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
