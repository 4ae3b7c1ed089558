"""One of several CPU ranks under ZeRO-3: generates, and writes what it holds of the weights, in bytes.

Run as `torchrun --nproc_per_node=N zero3_rank.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PREFETCH, PERSISTENCE, LIVE = 20_000, 200, 100_000
"""Elements: so few that a model of some hundred thousand parameters shows their effect."""
FAMILIES, OFFLOADS = ("gpt2", "llama", "t5"), ("none", "cpu")
_BATCH, _PROMPT, _NEW_TOKENS = 2, 6, 4


def main(folder: Path) -> None:
    """Generate with each model under the real engine, and write rankN.json."""
    import deepspeed
    import torch

    deepspeed.init_distributed(dist_backend="gloo")
    found = {
        f"{family} {offload}": _held(family, offload=offload) for family in FAMILIES for offload in OFFLOADS
    }
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


def _held(family: str, *, offload: str) -> dict[str, int]:
    import deepspeed
    import torch
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from real_models import real_model

    engine, *_ = deepspeed.initialize(model=real_model(family), config=_config(offload))
    parameters = list(engine.module.parameters())
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        whole = (ZeroParamStatus.AVAILABLE, ZeroParamStatus.INFLIGHT)
        held = sum(one.ds_numel * one.element_size() for one in parameters if one.ds_status in whole)
        most = max(most, held)

    for module in engine.module.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
    engine.module.generate(
        torch.full((_BATCH, _PROMPT), 3),
        attention_mask=torch.ones(_BATCH, _PROMPT, dtype=torch.long),
        max_new_tokens=_NEW_TOKENS,
        min_new_tokens=_NEW_TOKENS,
        do_sample=False,
        synced_gpus=True,
    )
    parts = sum(one.ds_tensor.numel() * one.ds_tensor.element_size() for one in parameters)
    engine.destroy()
    return {"parts": parts, "whole": most}


def _config(offload: str) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_prefetch_bucket_size": PREFETCH,
        "stage3_param_persistence_threshold": PERSISTENCE,
        "stage3_max_live_parameters": LIVE,
        "stage3_max_reuse_distance": LIVE,
    }
    if offload != "none":
        zero["offload_param"] = {"device": offload, "pin_memory": False}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
