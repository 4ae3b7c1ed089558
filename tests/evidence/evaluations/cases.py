"""Case: one Trainer whose evaluations are measured, and the table of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TRAIN_BATCH, EVAL_BATCH = 2, 4
"""Samples of each rank."""
LENGTH, SHORT_LENGTH = 64, 40
"""Tokens of a sample, and of every second batch of a case with batches of two lengths."""
NUM_BATCHES = 3
"""Batches that each rank evaluates."""
STEPS, EVAL_STEP = 3, 2
"""Optimizer steps, and the one after which the Trainer evaluates."""
BUCKETS = {
    "reduce_bucket_size": 500_000,
    "stage3_prefetch_bucket_size": 500_000,
    "stage3_param_persistence_threshold": 1_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""Small enough to be filled by a small model, as a large one fills those of a plan."""
RELEASING = {
    **BUCKETS,
    "stage3_prefetch_bucket_size": 600_000,
    "stage3_max_live_parameters": 1_500_000,
    "stage3_max_reuse_distance": 500_000,
}
"""With these stage 3 frees layers in the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    key: str
    stage: int | None
    """Of ZeRO; None is FSDP2."""
    bf16: bool = True
    reshard: bool = True
    """FSDP2's reshard_after_forward."""
    offload: bool = False
    """True if weights and optimizer are on the host."""
    keeps: str = "logits"
    """What the Trainer keeps of a batch: "logits", "reduced" ones, or the "loss" alone."""
    moves_every: int | None = None
    """eval_accumulation_steps."""
    concatenates: bool = True
    """eval_do_concat_batches."""
    by_batch: bool = False
    """batch_eval_metrics: metrics are computed of each batch, whose predictions stay no longer."""
    accumulation: int = 1
    """Micro-batches of a training step."""
    checkpointing: bool = False
    lora: bool = False
    """True if peft's adapters train, on the attention's query and value projections."""
    is_launched: bool = True
    """False if FSDP2 runs without what `zerofit launch` changes in it."""
    num_ranks: int = 2
    lacking: int = 0
    """Samples by which the last batches are not full."""
    has_lengths: bool = False
    """True if the last rank's batches are shorter, so that its predictions are padded to be gathered."""
    zero: dict[str, Any] = field(default_factory=lambda: dict(BUCKETS))
    """Keys of zero_optimization besides the stage and offload; of ZeRO alone."""


def deepspeed_config(case: Case) -> dict[str, Any]:
    """Return the case's DeepSpeed configuration."""
    zero: dict[str, Any] = {"stage": case.stage, "contiguous_gradients": True, **case.zero}
    for section in ("offload_optimizer", "offload_param"):
        if case.offload and not (section == "offload_param" and case.stage != 3):
            zero[section] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": TRAIN_BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": case.bf16},
        "zero_optimization": zero,
    }


def _named(prefix: str, **values: Any) -> list[Case]:
    """Return one case for each thing that a Trainer may keep, and the ways in which it keeps logits."""
    kept: dict[str, dict[str, Any]] = {
        "logits": {},
        "loss": {"keeps": "loss"},
        "reduced": {"keeps": "reduced"},
        "moved": {"moves_every": 1},
    }
    return [Case(key=f"{prefix}-{name}", **values, **more) for name, more in kept.items()]


CASES: tuple[Case, ...] = (
    *_named("fsdp2-bf16", stage=None),
    *_named("fsdp2-fp32", stage=None, bf16=False),
    *_named("fsdp2-bf16-kept", stage=None, reshard=False),
    Case(key="fsdp2-fp32-kept-loss", stage=None, bf16=False, reshard=False, keeps="loss"),
    Case(key="fsdp2-bf16-offload-logits", stage=None, offload=True),
    Case(key="fsdp2-bf16-offload-loss", stage=None, offload=True, keeps="loss"),
    Case(key="fsdp2-bf16-list", stage=None, concatenates=False),
    Case(key="fsdp2-bf16-lengths", stage=None, has_lengths=True),
    Case(key="fsdp2-bf16-odd", stage=None, lacking=3),
    Case(key="fsdp2-bf16-x2-kept", stage=None, reshard=False, accumulation=2),
    Case(key="fsdp2-bf16-checkpointing", stage=None, keeps="loss", checkpointing=True),
    Case(key="fsdp2-fp32-lora-loss", stage=None, bf16=False, keeps="loss", lora=True),
    Case(key="fsdp2-fp32-lora-logits", stage=None, bf16=False, lora=True),
    Case(key="fsdp2-bf16-by-accelerate", stage=None, is_launched=False),
    Case(key="fsdp2-fp32-by-batch-n4", stage=None, bf16=False, by_batch=True, num_ranks=4),
    Case(key="fsdp2-bf16-logits-n4", stage=None, num_ranks=4),
    *_named("zero3-bf16", stage=3),
    *_named("zero3-fp32", stage=3, bf16=False),
    *_named("zero3-bf16-releasing", stage=3, zero=RELEASING),
    Case(key="zero3-bf16-offload-logits", stage=3, offload=True),
    Case(key="zero3-bf16-offload-loss", stage=3, offload=True, keeps="loss"),
    Case(key="zero3-bf16-list", stage=3, concatenates=False),
    Case(key="zero3-bf16-lengths", stage=3, has_lengths=True),
    Case(key="zero3-bf16-odd", stage=3, lacking=3),
    Case(key="zero3-bf16-x2", stage=3, accumulation=2),
    Case(key="zero3-bf16-checkpointing", stage=3, keeps="loss", checkpointing=True),
    Case(key="zero3-bf16-releasing-checkpointing", stage=3, keeps="loss", checkpointing=True, zero=RELEASING),
    Case(key="zero3-fp32-lora-loss", stage=3, bf16=False, keeps="loss", lora=True),
    Case(key="zero3-fp32-lora-logits", stage=3, bf16=False, lora=True),
    Case(key="zero3-fp32-by-batch-n4", stage=3, bf16=False, by_batch=True, num_ranks=4),
    Case(key="zero3-bf16-logits-n4", stage=3, num_ranks=4),
    *_named("zero2-bf16", stage=2),
    Case(key="zero2-fp32-logits", stage=2, bf16=False),
    Case(key="zero2-bf16-x2", stage=2, accumulation=2),
    Case(key="zero1-bf16-x2", stage=1, accumulation=2),
    Case(key="zero2-bf16-offload-logits", stage=2, offload=True),
)
"""Every case."""
