"""What a script says, what runs, and why: which settings get a row, and the words in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from captured_scripts import captured_problem
from captures import LOOP, TRAINER, with_model
from planning_problems import solved
from small_runs import PLAN

from zerofit.core.capture import Capture
from zerofit.core.facts import Workload
from zerofit.core.plan import Origin, Plan, Reason, Topology
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    Strategy,
    ZeroStage,
)
from zerofit.planning.applied_table import Row, applied_rows, applied_table, changes_text


def _plan(*, world_size: int = 2, global_batch: int | None = None, reasons: Any = (), **fields: Any) -> Plan:
    return replace(
        PLAN,
        strategy=Strategy(**fields),
        topology=Topology(world_size=world_size),
        workload=Workload(global_batch_size=global_batch),
        reasons=tuple(
            Reason(field=field, value="", origin=origin, why=why) for field, origin, why in reasons
        ),
    )


_BATCH = {"micro_batch_size": 2, "gradient_accumulation_steps": 8}
_FITS = ("micro_batch_size", Origin.PLANNER, "the largest that fits")
_DS = {"engine": Engine.DEEPSPEED, "zero_stage": ZeroStage.GRADIENTS}


_CASES: dict[str, tuple[Plan, Capture | None, list[str]]] = {
    "nothing": (_plan(), LOOP, []),
    "nothing, not captured": (_plan(), None, []),
    "an engine of the script's own goes": (
        _plan(reasons=[("engine", Origin.PLANNER, "it fits")]),
        replace(LOOP, engine="FSDP"),
        ["engine: FSDP -> DDP (it fits)"],
    ),
    "a stage of the script's own goes": (
        _plan(**_DS, reasons=[("zero_stage", Origin.FLAG, "--zero-stage says so")]),
        replace(TRAINER, engine="DeepSpeed ZeRO-3"),
        ["engine: DeepSpeed ZeRO-3 -> DeepSpeed ZeRO-2 (--zero-stage says so)"],
    ),
    "smaller pieces": (
        _plan(**_BATCH, global_batch=32, reasons=[_FITS]),
        LOOP,
        ["batch on each rank: 8 x 2 -> 2 x 8 (the largest that fits; global batch 32 as before)"],
    ),
    "same batch": (_plan(micro_batch_size=8, gradient_accumulation_steps=2, global_batch=32), LOOP, []),
    "split_batches": (
        _plan(micro_batch_size=2, gradient_accumulation_steps=4, global_batch=16, reasons=[_FITS]),
        replace(LOOP, splits_batches=True),
        [
            "batch on each rank: 8 x 2 of all ranks -> 2 x 4 "
            "(the largest that fits; global batch 16 as before)"
        ],
    ),
    "another global batch": (
        _plan(**_BATCH, global_batch=64, reasons=[_FITS]),
        LOOP,
        [
            "global batch: 32 -> 64 (--global-batch-size 64 says so)",
            "batch on each rank: 8 x 2 -> 2 x 8 (the largest that fits)",
        ],
    ),
    "pieces, not captured": (
        _plan(micro_batch_size=2, reasons=[("micro_batch_size", Origin.FLAG, "--micro-batch-size says so")]),
        None,
        ["batch on each rank: its own -> pieces of 2 (--micro-batch-size says so)"],
    ),
    "accumulation, not captured": (
        _plan(
            gradient_accumulation_steps=4,
            reasons=[("gradient_accumulation_steps", Origin.FLAG, "--gradient-accumulation-steps says so")],
        ),
        None,
        [
            "batch on each rank: its own -> accumulation of 4 "
            "(--gradient-accumulation-steps says so; a step is then 4 of its own batches on each rank)"
        ],
    ),
    "the reason of a flag comes first": (
        _plan(
            **_BATCH,
            global_batch=32,
            reasons=[
                _FITS,
                ("gradient_accumulation_steps", Origin.FLAG, "--gradient-accumulation-steps says so"),
            ],
        ),
        TRAINER,
        [
            "batch on each rank: 8 x 2 -> 2 x 8 "
            "(--gradient-accumulation-steps says so; global batch 32 as before)"
        ],
    ),
    "counted by the loop itself": (
        _plan(**_BATCH, global_batch=32, reasons=[_FITS]),
        replace(LOOP, gradient_accumulation_steps=1, accumulates_by_hand=2),
        [
            "batch on each rank: 8 x 1, stepped every 2 -> 2 x 4, stepped every 2 "
            "(the largest that fits; global batch 32 as before)"
        ],
    ),
    "DeepSpeed": (
        _plan(**_DS, reasons=[("zero_stage", Origin.PLANNER, "the fastest that fits")]),
        LOOP,
        ["engine: DDP -> DeepSpeed ZeRO-2 (the fastest that fits)"],
    ),
    "DeepSpeed on one rank": (
        _plan(**_DS, world_size=1, reasons=[("engine", Origin.FLAG, "--engine says so")]),
        None,
        ["engine: plain PyTorch -> DeepSpeed ZeRO-2 (--engine says so)"],
    ),
    "offload": (
        _plan(
            **_DS,
            optimizer_offload=OffloadDevice.CPU,
            reasons=[("optimizer_offload", Origin.PLANNER, "nothing fits without offload")],
        ),
        LOOP,
        [
            "engine: DDP -> DeepSpeed ZeRO-2 (the plan says so)",
            "optimizer states: on the GPU -> in host memory (nothing fits without offload)",
            "optimizer: AdamW -> DeepSpeed's CPU Adam "
            "(states in host memory are stepped there; the same mathematics)",
        ],
    ),
    "an optimizer that was asked for, under offload": (
        _plan(**_DS, optimizer_offload=OffloadDevice.CPU, optimizer=OptimizerName.ADAMW),
        LOOP,
        [
            "engine: DDP -> DeepSpeed ZeRO-2 (the plan says so)",
            "optimizer states: on the GPU -> in host memory (the plan says so)",
            "optimizer: AdamW -> DeepSpeed's CPU Adam (the plan says so)",
        ],
    ),
    "precision": (
        _plan(precision=Precision.BF16, reasons=[("precision", Origin.PLANNER, "every GPU has bf16")]),
        LOOP,
        ["precision: none, weights in float32 -> bf16 (every GPU has bf16)"],
    ),
    "fp32 as before": (_plan(precision=Precision.FP32), LOOP, []),
    "bf16 as before": (_plan(precision=Precision.BF16), TRAINER, []),
    "a default gives way to the script": (
        _plan(precision=Precision.FP16, reasons=[("precision", Origin.DEFAULT, "old GPUs")]),
        TRAINER,
        [],
    ),
    "a flag does not": (
        _plan(precision=Precision.FP16, reasons=[("precision", Origin.FLAG, "--mixed-precision says so")]),
        TRAINER,
        ["precision: bf16 -> fp16 (--mixed-precision says so)"],
    ),
    "default precision, not captured": (
        _plan(precision=Precision.BF16, reasons=[("precision", Origin.DEFAULT, "every GPU has bf16")]),
        None,
        ["precision: its own -> bf16, where it names none (every GPU has bf16)"],
    ),
    "checkpointing": (
        _plan(gradient_checkpointing=True, reasons=[("gradient_checkpointing", Origin.PLANNER, "needed")]),
        LOOP,
        ["gradient checkpointing: off -> on (needed)"],
    ),
    "checkpoints already": (_plan(gradient_checkpointing=True), with_model(LOOP, checkpoints=True), []),
    "checkpointing off": (
        _plan(gradient_checkpointing=False),
        with_model(LOOP, checkpoints=True),
        ["gradient checkpointing: on -> off (the plan says so)"],
    ),
    "optimizer": (
        _plan(optimizer=OptimizerName.ADAMW_8BIT),
        LOOP,
        ["optimizer: AdamW -> 8-bit AdamW (the plan says so)"],
    ),
    "no clipping": (
        _plan(gradient_clipping=0.0),
        TRAINER,
        ["gradient clipping: norm 1 -> off (the plan says so)"],
    ),
    "clips as before": (_plan(gradient_clipping=1.0), TRAINER, []),
    "clipping": (
        _plan(gradient_clipping=0.5),
        LOOP,
        ["gradient clipping: its own -> norm 0.5 (the plan says so)"],
    ),
    "compile": (_plan(compile=True), LOOP, ["torch.compile: off -> on (the plan says so)"]),
    "attention and adapters": (
        _plan(attention="flash_attention_2", lora=Lora(rank=8)),
        LOOP,
        [
            "what trains: all parameters -> LoRA of rank 8, alpha 32 (the plan says so)",
            "attention: sdpa -> flash_attention_2 (the plan says so)",
        ],
    ),
    "frozen": (
        _plan(freeze=("embeddings+2",)),
        None,
        ["what trains: its own -> without embeddings+2 (the plan says so)"],
    ),
    "QLoRA": (
        _plan(lora=Lora(target_modules=("c_attn",)), quantization=Quantization.NF4),
        LOOP,
        [
            "what trains: all parameters -> LoRA of rank 16, alpha 32, in c_attn (the plan says so)",
            "frozen weights: float32 -> nf4 in its linear layers (the plan says so)",
        ],
    ),
    "some blocks checkpointed": (
        _plan(gradient_checkpointing=True, checkpoint_every=3),
        LOOP,
        ["gradient checkpointing: off -> of 1 block in 3 (the plan says so)"],
    ),
    "inputs of blocks on the host": (
        _plan(gradient_checkpointing=True, activation_offload=True),
        with_model(LOOP, checkpoints=True),
        ["gradient checkpointing: on -> on, inputs of blocks in host memory (the plan says so)"],
    ),
    "inputs of some blocks on the host": (
        _plan(gradient_checkpointing=True, checkpoint_every=3, activation_offload=True),
        None,
        [
            "gradient checkpointing: its own -> of 1 block in 3, inputs of blocks in host memory "
            "(the plan says so)"
        ],
    ),
    "kernels and batches": (
        _plan(tf32=True, liger=True, group_by_length=True),
        LOOP,
        [
            "modules: transformers' own -> Liger's kernels (the plan says so)",
            "fp32 products: its own -> tf32 on tensor cores (the plan says so)",
            "batches: in the order of its sampler -> of samples of like length (the plan says so)",
        ],
    ),
    "attention as before": (_plan(attention="sdpa"), LOOP, []),
    "BatchNorm": (
        _plan(micro_batch_size=8, gradient_accumulation_steps=2, global_batch=32),
        with_model(LOOP, mixes_samples=("bn1", "bn2")),
        [
            "batch on each rank: 8 x 2 -> 8 x 2, kept "
            "(bn1, bn2 of the model compute over all samples of a batch)"
        ],
    ),
    "can't checkpoint": (
        _plan(gradient_checkpointing=False),
        with_model(LOOP, can_checkpoint=False),
        [
            "gradient checkpointing: off -> off, kept "
            "(GPT2LMHeadModel does not support gradient checkpointing)"
        ],
    ),
    "two models": (
        _plan(),
        replace(LOOP, num_models=2),
        [],
    ),
    "two optimizers": (
        _plan(),
        replace(LOOP, optimizers=LOOP.optimizers * 2),
        ["optimizer: AdamW, AdamW -> AdamW, AdamW, kept (the script has several optimizers)"],
    ),
}


@pytest.mark.parametrize("case", _CASES)
def test_rows(case: str) -> None:
    plan, capture, expected = _CASES[case]
    rows = applied_rows(replace(plan, capture=capture))
    assert [f"{row.what}: {row.script_says} -> {row.runs} ({row.why})" for row in rows] == expected


def test_the_table() -> None:
    rows = (
        Row(what="batch on each rank", script_says="8 x 2", runs="2 x 8", why="the largest that fits"),
        Row(what="engine", script_says="DDP", runs="DeepSpeed ZeRO-2", why="the fastest that fits"),
    )
    assert applied_table(rows) == (
        "                    script alone  runs              why\n"
        "batch on each rank  8 x 2         2 x 8             the largest that fits\n"
        "engine              DDP           DeepSpeed ZeRO-2  the fastest that fits"
    )


def test_in_a_narrow_table_reasons_stand_whole_below() -> None:
    why = "with 4: needs at least 23.9 GiB of 22.5 GiB on each GPU"
    rows = (Row(what="batch on each rank", script_says="8 x 1", runs="2 x 4", why=why),)
    assert applied_table(rows, width=60) == (
        f"                    script alone  runs\nbatch on each rank  8 x 1         2 x 4\n    {why}"
    )


def test_a_table_of_nothing_says_so() -> None:
    assert applied_table(()) == "runs as the script says, without any change"


def test_a_plan_that_changes_nothing_says_so_once() -> None:
    as_it_is = solved(captured_problem(num_gpus=1))
    assert applied_rows(as_it_is.plan) == ()
    assert changes_text(as_it_is) == ""
    assert changes_text(replace(as_it_is, as_it_is=None)) == applied_table(())
    (why,) = (reason.why for reason in as_it_is.plan.reasons if reason.field == "micro_batch_size")
    assert why == "the script's own batch, not split"
    split = solved(captured_problem(num_gpus=1, memory_gib=5))
    assert changes_text(split) == applied_table(applied_rows(split.plan))
    assert "batch on each rank" in changes_text(split)
