"""A loop that works with weights by hand, as its --case says: under ZeRO-3 they are empty between passes."""

import argparse
import copy

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
)

WIDTH = 9000
"""So that weights are above the size below which ZeRO-3 keeps them whole."""
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**SMALL, "vocab_size": 50, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}


def ema(average, weights):
    with torch.no_grad():
        for own, new in zip(average, weights, strict=True):
            own.mul_(0.9).add_(new, alpha=0.1)


def largest_row(weight):
    return weight.abs().amax(dim=1).max()


def images(net, x):
    return net(torch.zeros(len(x), 3, 16, 16)).last_hidden_state[:, 0]


def texts(net, x):
    return net(torch.ones(len(x), 7, dtype=torch.long)).last_hidden_state[:, 0]


BEFORE = {
    "clones": lambda net: [one.detach().clone() for one in net.parameters()],
    "averaged": AveragedModel,
    "averaged-by-foreach": lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "deepcopy": copy.deepcopy,
    "clip-text": lambda net: CLIPTextModel._from_config(CLIPTextConfig(**TEXT)),
    "clip-vision": lambda net: CLIPVisionModel._from_config(
        CLIPVisionConfig(**SMALL, image_size=16, patch_size=8)
    ),
    "bert": lambda net: BertModel._from_config(BertConfig(**TEXT)),
}
"""What is made of the model, or beside it, before prepare()."""
AFTER = {
    "clones-of-prepared": lambda net: [one.detach().clone() for one in net.parameters()],
    "averaged-prepared": AveragedModel,
    "deepcopy-of-prepared": copy.deepcopy,
}
FEATURES = {"clip-text": texts, "clip-vision": images, "bert": texts}
AT_EACH_STEP = {
    "clones": lambda net, kept: ema(kept, net.parameters()),
    "clones-of-prepared": lambda net, kept: ema(kept, net.parameters()),
    "averaged": lambda net, kept: kept.update_parameters(net),
    "averaged-by-foreach": lambda net, kept: kept.update_parameters(net),
    "averaged-prepared": lambda net, kept: kept.update_parameters(net),
    "deepcopy": lambda net, kept: ema(kept.parameters(), net.parameters()),
    "deepcopy-of-prepared": lambda net, kept: ema(kept.parameters(), net.parameters()),
    "rows": lambda net, kept: 1 / net[0].weight.shape[0],
    "view": lambda net, kept: net[0].weight.view(WIDTH, 16),
    "singular-values": lambda net, kept: torch.linalg.svdvals(net[0].weight),
    "helper": lambda net, kept: largest_row(net[0].weight.data),
    "other-shape": lambda net, kept: list(net.parameters()) and torch.ones(8).view(3, 5),
    "other-labels": lambda net, kept: nn.functional.cross_entropy(
        net[2](torch.ones(8, WIDTH)), torch.ones(5).long()
    ),
    "other-empty": lambda net, kept: torch.zeros(0)[0],
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    case = parser.parse_args().case
    accelerator = Accelerator()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2))
    kept = BEFORE[case](net) if case in BEFORE else None
    x = torch.randn(16, 16)
    loader = DataLoader(TensorDataset(x, x[:, :2]), batch_size=8)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
    kept = AFTER[case](net) if case in AFTER else kept
    for x, y in loader:
        features = FEATURES[case](kept, x) if case in FEATURES else 0
        accelerator.backward(((model(x + features) - y) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if case in AT_EACH_STEP:
            AT_EACH_STEP[case](net, kept)


if __name__ == "__main__":
    main()
