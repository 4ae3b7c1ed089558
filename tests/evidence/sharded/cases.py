"""Case: one run under FSDP2 whose memory is measured, and the table of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

STEPS = 2
"""Optimizer steps of a case: FSDP2 makes its buffers, and the optimizer its states, in the first."""
BATCH, LENGTH = 4, 64
"""Rows of a micro-batch, and their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    key: str
    num_ranks: int = 2
    copies: int = 1
    """Copies of the sharded weights (dp_replicate_size)."""
    model: str = "llama"
    precision: str = "no"
    """accelerate's mixed precision."""
    reshard: bool = True
    accumulation: int = 1
    syncs_each_batch: bool = False
    checkpointing: bool = False
    offload: bool = False
    frozen: tuple[str, ...] = ()
    """Parts of the names of frozen weights."""
    lora: bool = False
    qlora: bool = False
    """Adapters over nf4 weights that are stored in bf16."""
    weights: str = "float32"
    """Format in which the script makes its model."""

    @property
    def trains_adapters(self) -> bool:
        return self.lora or self.qlora


def _key(values: dict[str, Any]) -> str:
    words = [values.get("model", "llama"), values.get("precision", "no"), f"n{values.get('num_ranks', 2)}"]
    words += ["kept"] if values.get("reshard") is False else []
    words += [f"x{values['accumulation']}"] if values.get("accumulation", 1) > 1 else []
    words += [f"copies{values['copies']}"] if values.get("copies", 1) > 1 else []
    flags = ("syncs_each_batch", "checkpointing", "offload", "lora", "qlora")
    words += [flag.replace("_", "-") for flag in flags if values.get(flag)]
    words += ["frozen-" + "-".join(values["frozen"])] if values.get("frozen") else []
    words += [values["weights"]] if values.get("weights") else []
    return "-".join(words)


def _case(**values: Any) -> Case:
    return Case(key=_key(values), **values)


def _tables() -> list[Case]:
    cases = [
        _case(num_ranks=ranks, precision=precision, reshard=reshard, checkpointing=checkpointing)
        for ranks, precision, reshard, checkpointing in product(
            (2, 4), ("no", "bf16"), (True, False), (False, True)
        )
    ]
    cases += [
        _case(model=model, precision=precision, num_ranks=ranks)
        for model, precision, ranks in product(
            ("llama-tied", "gpt2", "bert", "qwen3"), ("no", "bf16"), (2, 4)
        )
    ]
    cases += [
        _case(precision=precision, accumulation=accumulation, syncs_each_batch=syncs)
        for precision, accumulation, syncs in product(("no", "bf16"), (2, 4), (False, True))
    ]
    cases += [_case(precision=precision, accumulation=4, num_ranks=4) for precision in ("no", "bf16")]
    cases += [
        _case(precision=precision, offload=True, **more)
        for precision in ("no", "bf16")
        for more in (
            {},
            {"num_ranks": 4},
            {"accumulation": 3},
            {"checkpointing": True},
            {"reshard": False},
            {"model": "llama-tied"},
        )
    ]
    return cases


CASES: tuple[Case, ...] = (
    *_tables(),
    _case(lora=True),
    _case(lora=True, precision="bf16"),
    _case(lora=True, precision="bf16", weights="bfloat16"),
    _case(lora=True, precision="bf16", weights="bfloat16", num_ranks=4, checkpointing=True),
    _case(lora=True, precision="bf16", weights="bfloat16", accumulation=3),
    _case(lora=True, precision="bf16", weights="bfloat16", reshard=False),
    _case(lora=True, model="gpt2", precision="bf16"),
    _case(qlora=True, precision="bf16", weights="bfloat16"),
    _case(qlora=True, precision="bf16", weights="bfloat16", num_ranks=4),
    _case(qlora=True, precision="bf16", weights="bfloat16", checkpointing=True),
    _case(qlora=True, precision="bf16", weights="bfloat16", accumulation=3),
    _case(qlora=True, precision="bf16", weights="bfloat16", offload=True),
    _case(qlora=True, precision="bf16", weights="bfloat16", reshard=False),
    _case(frozen=("embed_tokens",)),
    _case(frozen=("embed_tokens", "layers.0.", "layers.1."), precision="bf16"),
    _case(frozen=("embed_tokens", "layers.0.", "layers.1."), reshard=False),
    _case(frozen=("mlp",), precision="bf16"),
    _case(frozen=("self_attn", "lm_head"), accumulation=2),
    _case(weights="bfloat16"),
    _case(weights="bfloat16", precision="bf16"),
    _case(precision="fp16"),
    _case(precision="bf16", num_ranks=4, copies=2),
    _case(num_ranks=4, copies=2),
    _case(precision="bf16", num_ranks=4, copies=2, accumulation=3),
    _case(precision="bf16", num_ranks=4, copies=2, reshard=False, checkpointing=True),
    _case(precision="bf16", num_ranks=4, copies=2, offload=True),
    _case(model="odd", precision="bf16"),
    _case(model="odd", num_ranks=4),
    _case(model="llama-tied", precision="bf16", accumulation=3, checkpointing=True),
    _case(model="gpt2", precision="bf16", accumulation=2, reshard=False),
    _case(model="bert", precision="bf16", checkpointing=True, num_ranks=4),
)
"""Every case."""
