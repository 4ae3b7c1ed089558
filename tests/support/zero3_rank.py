"""One of several CPU ranks under ZeRO-3: generates, and writes what it holds of the weights, in bytes.

Run as `torchrun --nproc_per_node=N zero3_rank.py FOLDER FAMILY...`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakSet

PREFETCH, PERSISTENCE, LIVE = 20_000, 200, 100_000
"""Elements: so few that a model of some hundred thousand parameters shows their effect."""
FAMILIES, MORE_FAMILIES = ("mixtral",), ("llama", "gpt2", "t5", "qwen3_moe", "phi3")
OFFLOADS = "none", "cpu"
_BATCH, _PROMPT, _NEW_TOKENS = 2, 6, 4
_HANDLES: WeakSet[Any] = WeakSet()
"""All-gathers of several parameters whose flat buffers are alive."""


def main(folder: Path, families: list[str]) -> None:
    """Generate with each model under the real engine, and write rankN.json."""
    import deepspeed
    import torch

    deepspeed.init_distributed(dist_backend="gloo")
    _note_handles()
    found = {
        f"{family} {offload}": _held(family, offload=offload) for family in families for offload in OFFLOADS
    }
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


def _held(family: str, *, offload: str) -> dict[str, int]:
    import deepspeed
    import torch
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle
    from real_models import real_model

    engine, *_ = deepspeed.initialize(model=real_model(family), config=_config(offload))
    parameters = list(engine.module.parameters())
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, _whole_bytes(parameters))

    was_waited = AllGatherCoalescedHandle.wait

    def wait(handle: Any, **named: Any) -> None:
        was_waited(handle, **named)
        look()  # parameters lie beside the buffer in which they came

    AllGatherCoalescedHandle.wait = wait
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
    AllGatherCoalescedHandle.wait = was_waited
    engine.destroy()
    return {"parts": parts, "whole": most}


def _whole_bytes(parameters: Iterable[Any]) -> int:
    """Return what whole parameters take, with the flat buffers from which they were copied."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    flat = sum(part.nbytes for handle in _HANDLES for part in handle.partitions)
    under_way = {one.ds_id for handle in _HANDLES if not handle.complete for one in handle.params}
    return flat + sum(
        one.ds_numel * one.element_size()
        for one in parameters
        if one.ds_status is not ZeroParamStatus.NOT_AVAILABLE and one.ds_id not in under_way
    )


def _note_handles() -> None:
    """Let every all-gather of several parameters be known for as long as its flat buffer lives."""
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle

    was = AllGatherCoalescedHandle.__init__

    def noted(handle: Any, *arguments: Any, **named: Any) -> None:
        was(handle, *arguments, **named)
        _HANDLES.add(handle)

    AllGatherCoalescedHandle.__init__ = noted


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
    main(Path(sys.argv[1]), sys.argv[2:])
