"""A small model whose parameters an optimizer has in two groups."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, WIDTH = 80, 64


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY))


def groups(net: torch.nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [net[0].weight, net[1].weight], "weight_decay": 0.1, "name": "the script's own"},
        {"params": [net[1].bias], "weight_decay": 0.0, "lr": 0.02},
    ]
