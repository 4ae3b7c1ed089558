"""Case: one run whose memory is measured, and the table of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

STEPS = 2
"""Optimizer steps of a case: the first makes the states and traces stage 3's order, the second uses both."""
OURS = {
    "reduce_bucket_size": 50_000_000,
    "allgather_bucket_size": 50_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""zerofit/core/strategy.py Buckets."""
SMALL = {**OURS, "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
"""Buckets that a small model fills more than once, as a large model fills ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    key: str
    stage: int | None
    """None is torch's DistributedDataParallel, without DeepSpeed."""
    optimizer_offload: bool = False
    param_offload: bool = False
    bf16: bool = True
    accumulation: int = 1
    num_ranks: int = 2
    model: str = "llama"
    frozen: bool = False
    """True if all but the attention's query and value projections are frozen."""
    lora: bool = False
    """True if peft's adapters train, on those projections; the frozen base is loaded in the run's format."""
    checkpointing: bool = False
    fused: bool = False
    """AdamW(fused=True); else AdamW(foreach=True), which CUDA takes by default."""
    zero_init: bool = False
    """True if the Accelerator is made before the model, which is then sharded as it is made; stage 3."""
    clipping: float = 1.0
    zero: dict[str, Any] = field(default_factory=lambda: dict(OURS))
    """Keys of zero_optimization besides the stage and offload."""
    tensor: int = 1
    """Ranks that share each layer."""
    sequence: int = 1
    """Ranks that share the tokens of a sample, as `zerofit launch` has them do."""
    pipeline: int = 1
    """Ranks that hold stages, which run by torch's schedules, without DeepSpeed."""
    stages_per_rank: int = 1
    micro_batches: int = 5
    """Of each pass of a pipeline."""
    length: int = 32
    """Tokens of a sample: so many that activations decide, where ranks share them."""
    top: dict[str, Any] = field(default_factory=dict)
    """Keys of the DeepSpeed configuration beside these."""


BATCH = 2
"""Rows of a micro-batch."""


def batch_bytes(case: Case) -> int:
    """Return the bytes of token ids and mask, which the script makes on the host."""
    return 2 * 8 * BATCH * case.length


def deepspeed_config(case: Case) -> dict[str, Any]:
    """Return the case's DeepSpeed configuration."""
    zero: dict[str, Any] = {"stage": case.stage}
    if case.stage:
        zero |= {"contiguous_gradients": True, **case.zero}
    cut = {"autotp_size": case.tensor, "vocab_parallel_lm_head": False}
    for section, wanted in (
        ("offload_optimizer", case.optimizer_offload),
        ("offload_param", case.param_offload),
    ):
        if wanted:
            zero[section] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "bf16": {"enabled": case.bf16},
        "zero_optimization": zero,
        **({"tensor_parallel": cut} if case.tensor > 1 else {}),
        **case.top,
    }


def _main() -> list[Case]:
    placements = ("zero0", "zero1", "zero1+optimizer", "zero2", "zero2+optimizer", "zero3", "zero3+optimizer")
    return [
        Case(
            key=f"{placement}-{precision}-x{accumulation}-n{num_ranks}",
            stage=int(placement[4]),
            optimizer_offload="+optimizer" in placement,
            param_offload="+param" in placement,
            bf16=precision == "bf16",
            accumulation=accumulation,
            num_ranks=num_ranks,
        )
        for num_ranks, precision, accumulation, placement in product(
            (2, 4), ("bf16", "fp32"), (1, 4), (*placements, "zero3+optimizer+param")
        )
        if not (num_ranks == 4 and placement == "zero0")  # on more ranks it holds the same
    ]


def _named(name: str, **values: Any) -> list[Case]:
    """Return one case a stage: 1, 2 and 3, or those named."""
    stages = values.pop("stages", (1, 2, 3))
    return [Case(key=f"zero{stage}-{name}", stage=stage, **values) for stage in stages]


CASES: tuple[Case, ...] = (
        *(
            Case(key=f"ddp-fp32-x{accumulation}-n2", stage=None, bf16=False, accumulation=accumulation)
            for accumulation in (1, 4)
        ),
        Case(key="ddp-fp32-view-n2", stage=None, bf16=False, zero={"gradient_as_bucket_view": True}),
        *_main(),
        *_named("default-buckets", zero={}),
        *_named("small-buckets", zero=SMALL),
        *_named("small-buckets-x4", zero=SMALL, accumulation=4),
        *_named("small-buckets-overlap", zero={**SMALL, "overlap_comm": True}),
        *_named("no-overlap", stages=(3,), zero={**OURS, "overlap_comm": False}),
        *_named("small-buckets-no-overlap", stages=(3,), zero={**SMALL, "overlap_comm": False}),
        *_named("not-contiguous", zero={**OURS, "contiguous_gradients": False}),
        *_named("all-reduce", stages=(1, 2), zero={**SMALL, "reduce_scatter": False}),
        *_named("small-buckets-offload", stages=(1, 2, 3), zero=SMALL, optimizer_offload=True),
        *_named("small-buckets-offload-x4", stages=(2, 3),
                zero=SMALL, accumulation=4, optimizer_offload=True),
        *_named("sub-groups", stages=(3,), zero={**OURS, "sub_group_size": 400_000}),
        *_named("sub-groups-offload", stages=(3,), zero={**OURS, "sub_group_size": 400_000},
                optimizer_offload=True, param_offload=True),
        *_named("released", stages=(3,), zero={
            **SMALL, "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}),
        *_named("released-prefetch", stages=(3,), zero={
            **SMALL, "stage3_prefetch_bucket_size": 600_000, "stage3_max_live_parameters": 1_500_000,
            "stage3_max_reuse_distance": 500_000, "stage3_param_persistence_threshold": 1_000}),
        *_named("released-checkpointing", stages=(3,), checkpointing=True, zero={
            **SMALL, "stage3_prefetch_bucket_size": 600_000, "stage3_max_live_parameters": 1_500_000,
            "stage3_max_reuse_distance": 500_000, "stage3_param_persistence_threshold": 1_000}),
        *_named("no-persistence", stages=(3,), zero={**OURS, "stage3_param_persistence_threshold": 0}),
        *_named("fused", fused=True),
        *_named("no-clipping", clipping=0.0),
        *_named("frozen", frozen=True),
        *_named("frozen-offload", frozen=True, optimizer_offload=True),
        *_named("checkpointing", checkpointing=True),
        *_named("bert", model="bert"),
        *_named("bert-offload", model="bert", optimizer_offload=True),
        *_named("fp32-accumulation", top={"data_types": {"grad_accum_dtype": "fp32"}}, accumulation=4),
        *_named("init", stages=(3,), zero_init=True),
        *_named("init-fp32", stages=(3,), zero_init=True, bf16=False),
        *_named("init-n4", stages=(3,), zero_init=True, num_ranks=4),
        *_named("init-offload", stages=(3,), zero_init=True, optimizer_offload=True, param_offload=True),
        *_named("round-robin", stages=(2,), zero={**SMALL, "round_robin_gradients": True}),
        *_named("lora", stages=(1, 2, 3), lora=True),
        *_named("init-lora", stages=(3,), zero_init=True, lora=True),
        *_named("tp2", tensor=2, length=512),
        *_named("tp2-checkpointing", tensor=2, length=512, checkpointing=True),
        *_named("tp2-n4", stages=(2, 3), tensor=2, length=512, num_ranks=4),
        *_named("sp2", sequence=2, length=512),
        *_named("sp2-checkpointing", sequence=2, length=512, checkpointing=True),
        *_named("sp2-n4", stages=(2, 3), sequence=2, length=512, num_ranks=4),
        *(
            Case(key=f"pp{stages}-{name}", stage=None, bf16=False, pipeline=stages, length=512, **values)
            for stages, name, values in (
                (2, "fp32", {}),
                (2, "fp32-x2", {"accumulation": 2}),
                (2, "fp32-checkpointing", {"checkpointing": True}),
                (2, "fp32-n4", {"num_ranks": 4}),
                (4, "fp32-n4", {"num_ranks": 4}),
                (2, "interleaved", {"stages_per_rank": 2, "micro_batches": 4}),
                (2, "interleaved-x2", {"stages_per_rank": 2, "micro_batches": 10, "accumulation": 2}),
                (2, "interleaved-checkpointing", {
                    "stages_per_rank": 2, "micro_batches": 8, "checkpointing": True,
                }),
            )
        ),
)  # fmt: skip
"""Every case, by its key."""
