"""Four ranks, two pipelines of two stages: passes of small models against those of the whole model."""

from __future__ import annotations

import copy
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from parallel_dimensions import save_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from zerofit.core.errors import UserError
from zerofit.training.changes import Changes
from zerofit.training.pipeline.make_pipeline import make_pipeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.training.pipeline.whole_state import WholeStates

STAGES = 2
LENGTH = 12
TIMEOUT_S = 333
"""Of the default process group, as ddp_timeout sets it."""


def batch_of(layout: str, *, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Return a batch; those of other seeds have other tokens and masks."""
    tokens = torch.randint(3, 128, (rows, LENGTH), generator=torch.manual_seed(seed))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch["labels"][:, : 2 + seed] = -100
    if layout in ("left", "right"):
        for row in range(rows):
            padding = slice(row % 5) if layout == "left" else slice(LENGTH - row % 5, None)
            batch.setdefault("attention_mask", torch.ones_like(tokens))[row, padding] = 0
            batch["labels"][row, padding] = -100
    if layout == "one row of positions":
        batch["position_ids"] = torch.arange(LENGTH)[None] + 3
    return batch


class Ranks:
    """This rank's place, and the models that it trains."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = dist.get_rank()
        self.copy = self.rank // STAGES
        self.changes = Changes(announce=False)

    def model(self, kind: str) -> Any:
        """Return a whole untrained model."""
        path = self.folder / kind.replace(" ", "-")
        if self.rank == 0 and not path.exists():
            save_model(kind, path)
        dist.barrier()
        return AutoModelForCausalLM.from_pretrained(path).train()

    def pipeline(
        self, model: Any, *, most_rows: int | None = None, blocks: tuple[int, ...] = (), per_rank: int = 1
    ) -> WholeStates:
        """Cut a model into stages."""
        topology = SimpleNamespace(pipeline_stages_per_rank=per_rank, stage_blocks=blocks)
        settings: Any = SimpleNamespace(
            pipeline_parallel_size=STAGES,
            most_rows=most_rows,
            plan=SimpleNamespace(generate_limit_s=4, topology=topology),
        )
        return make_pipeline(model, settings, self.changes)


def compared(
    ranks: Ranks,
    kind: str = "llama",
    layout: str = "whole",
    *,
    rows: int = 8,
    most_rows: int | None = None,
    frozen: tuple[str, ...] = (),
    autocast: bool = False,
    compiled: bool = False,
    blocks: tuple[int, ...] = (),
    per_rank: int = 1,
) -> dict[str, Any]:
    """Return how far loss, gradients and their norm are from those of one process with both batches."""
    model = ranks.model(kind)
    for name, one in model.named_parameters():
        one.requires_grad_(not any(part in name for part in frozen))
    alone = copy.deepcopy(model)
    batches = [batch_of(layout, rows=rows, seed=seed) for seed in (1, 2)]
    losses = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for batch in batches:
            losses.append(alone(**batch).loss)
        sum(losses).div(2).backward()
        whole = ranks.pipeline(model, most_rows=most_rows, blocks=blocks, per_rank=per_rank)
        seen: list[int] = []
        run = whole.pipeline._run

        def watched(stage: int, received: torch.Tensor, **more: Any) -> Any:
            if received.shape[1] == LENGTH:  # not the sample that tells the format of hidden states
                seen.append(len(received))
            return run(stage, received, **more)

        whole.pipeline._run = watched
        called = torch.compile(model, backend="eager") if compiled else model
        loss = called(**batches[ranks.copy]).loss
    loss.backward()
    expected = dict(alone.named_parameters())
    own = [(one, expected[name]) for name, one in model.named_parameters()]
    largest = max(
        (one.grad.abs().max().item() for one in expected.values() if one.grad is not None), default=1.0
    )
    differences = [(one.grad - other.grad).abs().max().item() for one, other in own if other.grad is not None]
    norm = whole.pipeline.norm([one for one, _ in own if one.requires_grad], 2.0, False)
    expected_norm = torch.nn.utils.get_total_norm(
        [one.grad for one in alone.parameters() if one.grad is not None]
    )
    return {
        "loss": abs(loss.item() - losses[ranks.copy].item()),
        "gradients": max(differences, default=0.0) / largest,
        "same have one": all((one.grad is None) == (other.grad is None) for one, other in own),
        "norm": abs(norm.item() / expected_norm.item() - 1),
        "rows": seen,
    }


def gradient_on_one_copy(ranks: Ranks) -> dict[str, Any]:
    """A parameter that only one copy of the model has a gradient of."""
    whole = ranks.pipeline(ranks.model("llama"))
    first = next(iter(whole.pipeline.parameters()))
    whole.pipeline.accumulate_gradients([(first, torch.ones_like(first))] if ranks.copy == 0 else [])
    others = [one.grad is None for one in whole.pipeline.parameters() if one is not first]
    return {"others have none": all(others), "mean": first.grad.mean().item()}


def timeouts(ranks: Ranks) -> dict[str, Any]:
    """How long operations of the pipeline's own process groups may take."""
    groups = ranks.pipeline(ranks.model("llama")).pipeline.groups
    made = (groups.pipeline, groups.host, groups.replicas, groups.ends)
    cpu = torch.device("cpu")
    return {"seconds": [one._get_backend(cpu).options._timeout.total_seconds() for one in made]}


def generated(ranks: Ranks, kind: str = "llama", *, per_rank: int = 1) -> dict[str, Any]:
    """Greedy text with a cache asked for, and sampled text where each rank has a random state of its own."""
    model = ranks.model(kind)
    prompts = batch_of("whole", rows=2, seed=3)["input_ids"]
    greedy = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(prompts, **greedy).tolist()
    ranks.pipeline(model, per_rank=per_rank)
    torch.manual_seed(ranks.rank)
    sampled = model.generate(prompts, max_new_tokens=5, do_sample=True).tolist()
    found = model.generate(prompts, use_cache=True, **greedy).tolist()
    return {"is_greedy": found == expected, "sampled": sampled, "keeps_cache": model.config.use_cache}


def generated_alone(ranks: Ranks) -> dict[str, Any]:
    """generate() called on the first stage of each pipeline alone."""
    model = ranks.model("llama")
    whole = ranks.pipeline(model)
    if whole.pipeline.groups.place:
        time.sleep(10)
        return {}
    return refused(lambda: model.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=2))


def saved(ranks: Ranks, kind: str = "tied", *, per_rank: int = 1) -> dict[str, Any]:
    """save_pretrained() and get_state_dict() on all ranks, then on rank 0 alone."""
    model = ranks.model(kind)
    expected = {name: one.clone() for name, one in model.state_dict().items()}
    path = ranks.folder / kind.replace(" ", "-")
    whole = ranks.pipeline(model, per_rank=per_rank)
    model.save_pretrained(ranks.folder / "saved")
    weights = whole.weights("accelerator.get_state_dict")
    found = {
        "weights": [bool(torch.equal(weights[name], one)) for name, one in expected.items() if weights],
        "files": [
            (ranks.folder / "saved" / name).read_bytes() == (path / name).read_bytes()
            for name in ("model.safetensors", "config.json", "generation_config.json")
            if ranks.rank == 0
        ],
    }
    if per_rank > 1:
        return found
    if ranks.rank:
        time.sleep(10)
        return found
    return found | refused(lambda: model.save_pretrained(ranks.folder / "again"))


def refusals(ranks: Ranks) -> dict[str, Any]:
    """What a pass of a pipeline does not take, and what its output does not have."""
    model = ranks.model("llama")
    whole = ranks.pipeline(model)
    batch = batch_of("whole", rows=4, seed=1)
    mixed = {name: one.flip(0) if ranks.rank % STAGES else one for name, one in batch.items()}
    foreign = torch.nn.Parameter(torch.ones(1))
    ema = copy.deepcopy(model)

    def in_fp16() -> None:
        with torch.autocast("cpu", torch.float16):
            model(**batch)

    outputs = model(**batch)
    tries: dict[str, Callable[[], Any]] = {
        "logits": lambda: outputs.logits,
        "logits by name": lambda: outputs["logits"],
        "rows in another order": lambda: model(**mixed),
        "hidden states": lambda: model(**batch, output_hidden_states=True),
        "embeddings": lambda: model(inputs_embeds=torch.zeros(4, LENGTH, 64), labels=batch["labels"]),
        "odd argument": lambda: model(**batch, cu_seq_lens_q=torch.arange(3)),
        "router": lambda: model(**batch, output_router_logits=True),
        "fp16": in_fp16,
        "no labels": lambda: model(input_ids=batch["input_ids"]),
        "copy": lambda: ema(**batch),
        "copy saved": lambda: ema.save_pretrained(ranks.folder / "copy"),
        "clock": lambda: model.generate(batch["input_ids"], max_time=1.0),
        "optimizer": lambda: whole.cut_optimizer(torch.optim.SGD([foreign], lr=0.1)),
        "second router": lambda: ranks.pipeline(_with_router_loss(ranks.model("mixtral"))),
    }
    found = {name: refused(one)["rule"] for name, one in tries.items()}
    found["hasattr"] = hasattr(outputs, "logits")
    found["unpacked"] = len(outputs.to_tuple())
    return found


def _with_router_loss(model: Any) -> Any:
    model.config.output_router_logits = True
    return model


def evaluated(ranks: Ranks, kind: str = "llama", *, per_rank: int = 1) -> dict[str, Any]:
    """Evaluation with logits, and for the loss alone; a training pass in eval() is noted."""
    model = ranks.model(kind).eval()
    batch = batch_of("left", rows=5, seed=1)
    with torch.no_grad():
        expected = model(**batch)
        whole = ranks.pipeline(model, per_rank=per_rank)
        found = model(**batch)
        whole.pipeline.gives_logits = False
        alone = model(**batch)
    model(**batch)
    return {
        "logits": (found.logits - expected.logits).abs().max().item(),
        "loss": abs(found.loss.item() - expected.loss.item()),
        "alone": [alone.logits is None, alone.loss.item() == found.loss.item()],
        "noted": [one for one in ranks.changes.lines if "in eval()" in one],
    }


def refused(act: Callable[[], Any]) -> dict[str, Any]:
    """Return the refusal of what is tried."""
    try:
        act()
    except UserError as error:
        return {"rule": error.rule, "found": error.found}
    return {"rule": None, "found": None}


CASES: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    "tied": lambda ranks: compared(ranks, "tied"),
    "gpt2": lambda ranks: compared(ranks, "gpt2"),
    "mixtral": lambda ranks: compared(ranks, "mixtral"),
    "eleven rows, three a pass": lambda ranks: compared(ranks, rows=11, most_rows=3),
    "nine rows": lambda ranks: compared(ranks, rows=9),
    "one row": lambda ranks: compared(ranks, rows=1),
    "padded on the left": lambda ranks: compared(ranks, layout="left", rows=5),
    "padded on the right": lambda ranks: compared(ranks, layout="right", most_rows=2),
    "one row of positions": lambda ranks: compared(ranks, layout="one row of positions"),
    "frozen first stage": lambda ranks: compared(ranks, frozen=("embed", "layers.0")),
    "frozen last stage": lambda ranks: compared(ranks, frozen=("layers.1", "model.norm", "lm_head")),
    "compiled": lambda ranks: compared(ranks, compiled=True),
    "unequal stages": lambda ranks: compared(ranks, "qwen3, four blocks", blocks=(1, 3)),
    "interleaved": lambda ranks: compared(ranks, "qwen3, four blocks", per_rank=2),
    "interleaved, five rows": lambda ranks: compared(ranks, "tied, four blocks", rows=5, per_rank=2),
    "interleaved, bf16": lambda ranks: compared(ranks, "qwen3, four blocks", per_rank=2, autocast=True),
    "bf16": lambda ranks: compared(ranks, autocast=True),
    "gradient on one copy": gradient_on_one_copy,
    "timeouts": timeouts,
    "generated": generated,
    "generated alone": generated_alone,
    "saved": saved,
    "refusals": refusals,
    "evaluated": evaluated,
    "interleaved, generated": lambda ranks: generated(ranks, "qwen3, four blocks", per_rank=2),
    "interleaved, saved": lambda ranks: saved(ranks, "tied, four blocks", per_rank=2),
    "interleaved, evaluated": lambda ranks: evaluated(ranks, "qwen3, four blocks", per_rank=2),
}


def main(folder: Path, cases: list[str]) -> None:
    """Run cases, and write down what each rank found."""
    logging.disable_progress_bar()
    PartialState(cpu=True, timeout=timedelta(seconds=TIMEOUT_S))
    ranks = Ranks(folder)
    for number, case in enumerate(cases or CASES):
        result = CASES[case](ranks)
        (folder / f"{number}-{ranks.rank}.json").write_text(json.dumps({case: result}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
