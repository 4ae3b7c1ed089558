"""The cases of rank 0 of many under FSDP2 and DeepSpeed, most wanted first, and small ones for the CPU."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_truth.cases import MODELS
from gpu_truth.results import Case
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    Precision,
    Quantization,
    Strategy,
    ZeroStage,
)

_BERT, _1B, _8B = "bert-large-uncased", "llama-3.2-1b", "llama-3.1-8b"
_S_BERT, _S_GPT2, _S_LLAMA = "all-minilm-l6-v2", "distilgpt2", "llama-68m"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What of a model goes through one forward pass, and how."""

    micro_batch_size: int
    sequence_length: int
    checkpoints: bool
    weights: Precision
    """As the script makes them; those of 8 billion parameters in 16 bit, as from_pretrained() loads them."""
    num_steps: int
    """Few: the warm-up reaches the peak, and no time is predicted of ranks that exchange nothing."""


_SHAPES = {
    _BERT: _Shape(
        micro_batch_size=8, sequence_length=128, checkpoints=False, weights=Precision.FP32, num_steps=3
    ),
    _1B: _Shape(
        micro_batch_size=1, sequence_length=512, checkpoints=False, weights=Precision.FP32, num_steps=3
    ),
    _8B: _Shape(
        micro_batch_size=1, sequence_length=512, checkpoints=True, weights=Precision.BF16, num_steps=2
    ),
    **{
        model: _Shape(
            micro_batch_size=2, sequence_length=32, checkpoints=False, weights=Precision.FP32, num_steps=1
        )
        for model in (_S_BERT, _S_GPT2, _S_LLAMA)
    },
}
"""ASSUMPTION: of each so little that all of RANKS fits into a few minutes: what is looked at are partitions,
buffers and states, which micro-batch and length do not change. 8 billion parameters leave room for few
activations beside them, so checkpointing is on there."""
_OFFLOADS = {
    "": (OffloadDevice.NONE, OffloadDevice.NONE),
    "offload-optimizer": (OffloadDevice.CPU, OffloadDevice.NONE),
    "offload-param": (OffloadDevice.CPU, OffloadDevice.CPU),
}
"""Of the optimizer and of the parameters, by the word in a key: the second is of both."""


def rank_case(
    model: str,
    num_ranks: int,
    stage: int,
    offload: str = "",
    *,
    windows: int = 1,
    precision: Precision = Precision.BF16,
) -> Case:
    """Return a case, whose key says all that it is; its group is the stage and what is offloaded.

    Args:
        model: a name that _SHAPES has.
        num_ranks: data-parallel ranks.
        stage: of ZeRO.
        offload: a word of _OFFLOADS.
        windows: micro-batches of an optimizer step.
        precision: of the computation.
    """
    shape = _SHAPES[model]
    optimizer_offload, param_offload = _OFFLOADS[offload]
    words = [f"zero-{stage}", *([offload] if offload else [])]
    own = [precision.value] if precision is not Precision.BF16 else []
    own += [f"accumulate-{windows}"] if windows > 1 else []
    strategy = Strategy(
        engine=Engine.DEEPSPEED,
        zero_stage=ZeroStage(stage),
        optimizer_offload=optimizer_offload,
        param_offload=param_offload,
        precision=precision,
        micro_batch_size=shape.micro_batch_size,
        gradient_accumulation_steps=windows,
        gradient_checkpointing=shape.checkpoints,
        attention="sdpa",
    )
    return Case(
        key="-".join([model, *words, f"of-{num_ranks}", *own]),
        group=" ".join(words),
        model=model,
        task=MODELS[model][1],
        strategy=strategy,
        sequence_length=shape.sequence_length,
        weights=shape.weights,
        num_ranks=num_ranks,
        num_steps=shape.num_steps,
    )


def sharded_case(
    model: str,
    num_ranks: int,
    *,
    keeps: bool = False,
    offloads: bool = False,
    lora: int = 0,
    is_packed: bool = False,
    windows: int = 1,
    precision: Precision = Precision.BF16,
) -> Case:
    """Return a case under FSDP2, whose key says all that it is.

    Args:
        model: a name that _SHAPES has.
        num_ranks: ranks that share the one copy.
        keeps: whether a unit's gathered weights stay until its backward pass.
        offloads: whether shards, gradients and the step are on the host.
        lora: rank of the adapters; 0 for none.
        is_packed: whether the base is nf4 in elements of the computation's format, which FSDP2 shards.
        windows: micro-batches of an optimizer step.
        precision: of the computation.
    """
    shape = _SHAPES[model]
    offload = OffloadDevice.CPU if offloads else OffloadDevice.NONE
    told = {
        "kept": keeps,
        "offload": offloads,
        f"lora-{lora}": lora,
        "nf4": is_packed,
        precision.value: precision is not Precision.BF16,
        f"accumulate-{windows}": windows > 1,
    }
    words = [word for word, is_so in told.items() if is_so]
    strategy = Strategy(
        engine=Engine.FSDP2,
        reshard_after_forward=not keeps,
        optimizer_offload=offload,
        param_offload=offload,
        precision=precision,
        micro_batch_size=shape.micro_batch_size,
        gradient_accumulation_steps=windows,
        gradient_checkpointing=shape.checkpoints,
        attention="sdpa",
        lora=Lora(rank=lora, alpha=2 * lora) if lora else None,
        quantization=Quantization.NF4 if is_packed else None,
        quant_storage=precision if is_packed else None,
    )
    return Case(
        key="-".join([model, "fsdp2", *words, f"of-{num_ranks}"]),
        group=f"fsdp2{' offload' if offloads else ''}",
        model=model,
        task=MODELS[model][1],
        strategy=strategy,
        sequence_length=shape.sequence_length,
        weights=shape.weights,
        num_ranks=num_ranks,
        num_steps=shape.num_steps,
    )


RANKS: tuple[Case, ...] = (
    sharded_case(_1B, 8),
    sharded_case(_8B, 8),
    sharded_case(_1B, 8, keeps=True),
    sharded_case(_8B, 8, lora=16, is_packed=True),
    sharded_case(_1B, 8, windows=4),
    sharded_case(_1B, 8, offloads=True),
    sharded_case(_8B, 8, lora=16),
    sharded_case(_BERT, 2, precision=Precision.FP32),
    rank_case(_1B, 8, 3),
    rank_case(_1B, 8, 2),
    rank_case(_1B, 8, 2, "offload-optimizer"),
    rank_case(_1B, 8, 3, "offload-param"),
    rank_case(_1B, 8, 1),
    rank_case(_8B, 8, 3),
    rank_case(_1B, 8, 3, "offload-optimizer"),
    rank_case(_8B, 64, 3, "offload-param"),
    rank_case(_BERT, 2, 2),
    rank_case(_BERT, 2, 3),
    rank_case(_BERT, 2, 1),
    rank_case(_1B, 4, 1, "offload-optimizer"),
    rank_case(_1B, 4, 2),
    rank_case(_BERT, 4, 1),
    rank_case(_BERT, 4, 2, "offload-optimizer"),
    rank_case(_BERT, 4, 3, "offload-param"),
    rank_case(_1B, 64, 3),
    rank_case(_1B, 64, 2, windows=4),
    rank_case(_1B, 8, 2, "offload-optimizer", windows=4),
    rank_case(_8B, 8, 3, "offload-optimizer"),
    rank_case(_8B, 64, 1),
)
"""For a GPU of 80 GB and a host of 128 GiB."""

RANKS_ON_CPU: tuple[Case, ...] = (
    sharded_case(_S_BERT, 8),
    sharded_case(_S_GPT2, 2, keeps=True, windows=2, precision=Precision.FP32),
    sharded_case(_S_LLAMA, 4, lora=8, is_packed=True),
    rank_case(_S_BERT, 8, 3),
    rank_case(_S_BERT, 8, 2, "offload-optimizer"),
    rank_case(_S_BERT, 2, 1, precision=Precision.FP32),
    rank_case(_S_GPT2, 4, 2, windows=2),
    rank_case(_S_LLAMA, 64, 3, "offload-param"),
    rank_case(_S_BERT, 64, 1, "offload-optimizer"),
)
"""A few seconds each on two cores."""
