"""Ranks that generate by transformers and DeepSpeed alone: what happens there without zerofit.

Usage: torchrun --nproc_per_node 2 stock_ranks.py FOLDER WAY; each rank writes FOLDER/rank0.json and so on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from heart import START_S, Heart
from random_cases import MAX_POSITIONS, Family
from tiny_engines import engine_of
from tiny_models import make_model

WAYS: dict[str, tuple[bool, tuple[tuple[tuple[int, int], ...], ...]]] = {
    "in step": (True, (((5, 6), (3, 4)), ((7, 3), (2, 9)))),
    "uneven lengths, synced_gpus=False": (False, (((5, 2), (3, 2)), ((7, 12), (2, 12)))),
    "uneven numbers of prompts, synced_gpus=True": (True, (((5, 6),), ((7, 3), (2, 9)))),
    "waits near its last position": (True, (((MAX_POSITIONS - 4, 4),), ((4, 32),))),
}
"""By name: synced_gpus, and for each rank its prompts, as numbers of tokens and of new tokens."""


def main(folder: Path, way: str) -> None:
    """Generate for each of this rank's prompts by itself."""
    import deepspeed

    rank = int(os.environ["RANK"])
    heart = Heart(folder, rank)
    heart.beat("start", limit_s=START_S)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    synced_gpus, prompts = WAYS[way]
    engine = engine_of(make_model(Family.GPT2, is_tied=True, weight_seed=0), trains=False)
    lengths = []
    for number, (num_tokens, max_new_tokens) in enumerate(prompts[rank]):
        heart.beat(f"prompt {number}")
        lengths.append(_generate(engine.module, num_tokens, max_new_tokens, synced_gpus))
    (folder / f"rank{rank}.json").write_text(json.dumps(lengths))
    heart.beat("end")
    deepspeed.comm.barrier()
    os._exit(0)


def _generate(model: Any, num_tokens: int, max_new_tokens: int, synced_gpus: bool) -> int:
    """Return how many new tokens came."""
    import torch

    prompt = torch.arange(num_tokens).remainder(50).unsqueeze(0)
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        synced_gpus=synced_gpus,
    )
    return found.shape[1] - num_tokens


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
