"""Two ranks that share samples: gradients and logits of small models in parts, against those of the whole."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_dimensions import save_model
from transformers import AutoModelForCausalLM

from zerofit.core.errors import UserError
from zerofit.core.upstream.deepspeed import sequence_groups
from zerofit.training.setup.deepspeed.sequence_shards import Shards

BATCHES = ("even", "odd", "right", "left", "packed", "packed odd", "restarting", "no labels", "checkpointed")


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    """Return a batch, the same on both ranks."""
    length = 15 if "odd" in kind else 16
    tokens = torch.randint(3, 128, (3, length), generator=torch.manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch["labels"][:, :3] = -100
    if kind in ("right", "left"):
        padding = slice(-5, None) if kind == "right" else slice(5)
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][1, padding] = 0
        batch["labels"][1, padding] = -100
    if kind.startswith(("packed", "restarting")):
        batch["position_ids"] = (torch.arange(length) % 6).expand(3, -1)
    return batch


def loss_of(outputs: Any, batch: dict[str, torch.Tensor], *, by_script: bool) -> torch.Tensor:
    """Return the model's loss, or one that a script makes of its logits."""
    if not by_script:
        return outputs["loss"]
    logits, labels = outputs["logits"][:, :-1], batch["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def compared(model: Any, shards: Shards, kind: str) -> dict[str, float]:
    """Return how far loss, gradients and logits in parts are from those of the whole."""
    batch, by_script = batch_of(kind), kind == "no labels"
    inputs = {name: one for name, one in batch.items() if name != "labels" or not by_script}
    model.config.use_cache = not kind.startswith("packed")  # Trainer switches it off
    if kind == "checkpointed":
        model.gradient_checkpointing_enable()
    losses, gradients = [], []
    for run in (lambda **inputs: model(**inputs), lambda **inputs: shards.forward(model, inputs)):
        model.zero_grad()
        loss = loss_of(run(**inputs), batch, by_script=by_script)
        loss.backward()
        losses.append(loss.item())
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    model.gradient_checkpointing_disable()
    whole, parts = (torch.cat([one.flatten() for one in some]) for some in gradients)
    dist.all_reduce(parts)
    with torch.no_grad():
        expected, logits = model(**inputs).logits, shards.forward(model, dict(inputs))["logits"]
    counts = (
        batch["attention_mask"] == 1 if "attention_mask" in batch else torch.ones(3, expected.shape[1]) > 0
    )
    return {
        "loss": abs(losses[0] - losses[1]),
        "gradients": ((parts - whole).abs().max() / whole.abs().max()).item(),
        "logits": (logits - expected)[counts].abs().max().item(),
    }


def result_of(kind: str, folder: Path, rank: int) -> dict[str, Any]:
    """Return the comparisons of one model, or why it is refused."""
    path = folder / kind.replace(" ", "-")
    if rank == 0:
        save_model(kind, path)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(path).train()
    try:
        shards = Shards(model, group=dist.group.WORLD)
        shards.check(model)
    except UserError as refused:
        return {"rule": refused.rule, "found": refused.found, "why": refused.why}
    return {batch: compared(model, shards, batch) for batch in BATCHES}


def clipped_norm() -> float:
    """Return the norm that DeepSpeed's engine clips by at stage 0, of a gradient whose norm is 5."""
    import deepspeed
    from deepspeed.runtime.utils import clip_grad_norm_

    deepspeed.init_distributed("gloo")
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    return float(clip_grad_norm_([weight], max_norm=1.0, mpu=sequence_groups(dist.get_world_size())))


def main(folder: Path, kinds: list[str]) -> None:
    """Compare each kind of model."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    results = {kind: result_of(kind, folder, rank) for kind in kinds}
    results["stage 0"] = {"clipped norm": clipped_norm()}
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
