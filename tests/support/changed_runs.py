"""Launches scripts/changed.py under a flag that changes its model, and reads what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runs import SCRIPTS, Run


def untrained(folder: Path) -> str:
    """Write the checkpoint that the script starts from, and return its folder."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = BertConfig(vocab_size=64, max_position_embeddings=16, **sizes)
    BertForMaskedLM(config).save_pretrained(folder)
    return str(folder)


def facts_of(
    launch: Callable[..., Run], folder: Path, route: str, *flags: str
) -> tuple[Run, list[dict[str, Any]]]:
    """Return the finished run, and the facts that each of its ranks wrote."""
    base = untrained(folder / "base")
    run = launch("--no-capture", *flags, str(SCRIPTS / "changed.py"), route, base).check()
    files = sorted(run.folder.glob("facts*.json"))
    return run, [json.loads(file.read_text()) for file in files]
