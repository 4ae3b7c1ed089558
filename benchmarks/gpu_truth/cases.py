"""The cases of one process on one GPU, the most wanted first, and the small ones for the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gpu_truth.results import Case
from zerofit.core.strategy import Lora, OptimizerName, Precision, Quantization, Strategy

CONFIGS = Path(__file__).with_name("configs")
"""Shapes that zerofit's catalog lacks, small ones for the CPU, written down from general knowledge. They give
the parameters that were published:
distilgpt2, 82 M: https://huggingface.co/distilbert/distilgpt2
llama-68m, 68 M: https://huggingface.co/JackFram/llama-68m
t5-efficient-tiny, 15.58 M: https://huggingface.co/google/t5-efficient-tiny
vit-tiny, 5.7 M: https://arxiv.org/abs/2106.10270, table 2 (Ti/16)"""
_IMAGE_TOKENS = 197
"""Patches of 16 of an image of 224, and one for the class: what every ViT here attends over."""
_FP32_FLOPS_PER_S, _16BIT_FLOPS_PER_S = 4e13, 3e14
"""ASSUMPTION: what a GPU of the class of H100 achieves; it only orders the cases."""
_BYTES_PER_S = 2e12
"""ASSUMPTION: the same of its memory."""
_CPU_FP32_FLOPS_PER_S, _CPU_16BIT_FLOPS_PER_S, _CPU_BYTES_PER_S = 4e10, 1e9, 1e10
"""ASSUMPTION: the same of two cores without instructions for 16 bit: on an AMD EPYC with AVX2 a bf16 product
took 35 times as long as in fp32. Cases in 16 bit come last there, or one of them may take all the time."""
_STEP_BYTES = 64
"""ASSUMPTION: bytes that making and stepping move for each parameter."""
_FORWARD_AND_BACKWARD, _FORWARD_AGAIN = 6, 2
"""Operations a parameter and token: 2 forward, 4 backward (https://arxiv.org/abs/2001.08361, section 2.1),
and 2 more where checkpointing takes the forward pass twice."""
_GPU_STEPS = 5
"""Timed steps. ASSUMPTION: their median stands against two that something disturbed."""
_CPU_STEPS = 2
"""Timed steps on the CPU, where memory is what one looks at."""
_BERT, _GPT2, _T5, _VIT, _VIT_LARGE = "bert-large-uncased", "gpt2", "t5-base", "vit-base", "vit-large"
_1B, _8B = "llama-3.2-1b", "llama-3.1-8b"
_S_BERT, _S_GPT2, _S_LLAMA, _S_T5 = "all-minilm-l6-v2", "distilgpt2", "llama-68m", "t5-efficient-tiny"
_S_VIT = "vit-tiny"
_SMALL = frozenset({_S_BERT, _S_GPT2, _S_LLAMA, _S_T5, _S_VIT})
"""Models for the CPU."""
MODELS = {
    _BERT: ("bert", "sequence-classification", 335e6),
    _S_BERT: ("bert", "sequence-classification", 23e6),
    _GPT2: ("gpt2", "causal-lm", 124e6),
    _S_GPT2: ("gpt2", "causal-lm", 82e6),
    _T5: ("t5", "seq2seq-lm", 223e6),
    _S_T5: ("t5", "seq2seq-lm", 15.6e6),
    _VIT: ("vit", "image-classification", 86.6e6),
    _VIT_LARGE: ("vit", "image-classification", 304e6),
    _S_VIT: ("vit", "image-classification", 5.7e6),
    _1B: ("llama 1B", "causal-lm", 1.24e9),
    _8B: ("llama 8B", "causal-lm", 8.03e9),
    _S_LLAMA: ("llama", "causal-lm", 68e6),
}
"""Group, task and about how many parameters, by model: counting those of a config would take seconds here."""
_FORMATS = {
    "fp32": (Precision.FP32, Precision.FP32),
    "bf16": (Precision.BF16, Precision.BF16),
    "fp16": (Precision.FP16, Precision.FP16),
    "autocast-bf16": (Precision.FP32, Precision.BF16),
    "autocast-fp16": (Precision.FP32, Precision.FP16),
}
"""Format of the weights, and that of the computation, by the word in a key."""
_OPTIMIZERS = {
    "foreach": None,
    "fused": OptimizerName.ADAMW,
    "8bit": OptimizerName.ADAMW_8BIT,
    "adafactor": OptimizerName.ADAFACTOR,
    "sgd": OptimizerName.SGD,
}
"""AdamW under its three forms, and others, by the word in a key."""


def model_path(name: str) -> str:
    """Return what a model is read from: its config beside the cases, else its name in the catalog."""
    own = CONFIGS / f"{name}.json"
    return str(own) if own.exists() else name


def case(
    model: str,
    batch: tuple[int, int],
    number_format: str = "fp32",
    optimizer: str = "foreach",
    *,
    attention: str = "sdpa",
    windows: int = 1,
    checkpoint_every: int = 0,
    lora: int = 0,
    freeze: str = "",
    is_packed: bool = False,
    liger: bool = False,
    calibrates: bool = False,
    num_steps: int = _GPU_STEPS,
    again: str = "",
) -> Case:
    """Return a case, whose key says all that it is.

    Args:
        model: a name that MODELS has.
        batch: samples of a micro-batch, and tokens of a sample; 1 for images.
        number_format: a word of _FORMATS.
        optimizer: a word of _OPTIMIZERS.
        attention: transformers' attention.
        windows: micro-batches of an optimizer step.
        checkpoint_every: of the blocks, one in so many recomputes; 0 for none.
        lora: rank of the adapters; 0 for none.
        freeze: what does not train, as zerofit/core/freezing.py words it.
        is_packed: whether the base is nf4; it needs adapters.
        liger: whether Liger's kernels run.
        calibrates: whether it may set a number of the catalog.
        num_steps: steps that are timed.
        again: why it is measured once more.
    """
    size, length = batch
    weights, precision = _FORMATS[number_format]
    group, task, _ = MODELS[model]
    said = {
        "eager": attention == "eager",
        f"accumulate-{windows}": windows > 1,
        f"checkpoint-{checkpoint_every}": checkpoint_every,
        f"lora-{lora}": lora,
        f"freeze-{freeze}": freeze,
        "nf4": is_packed,
        "liger": liger,
    }
    words = [
        model,
        f"{size}x{length}",
        number_format,
        optimizer,
        *(word for word, is_so in said.items() if is_so),
    ]
    strategy = Strategy(
        precision=precision,
        micro_batch_size=size,
        gradient_accumulation_steps=windows,
        gradient_checkpointing=checkpoint_every > 0,
        checkpoint_every=checkpoint_every or 1,
        optimizer=_OPTIMIZERS[optimizer],
        attention=attention,
        freeze=(freeze,) if freeze else (),
        lora=Lora(rank=lora, alpha=2 * lora) if lora else None,
        quantization=Quantization.NF4 if is_packed else None,
        liger=liger,
    )
    return Case(
        key="-".join(words),
        group=group,
        model=model,
        task=task,
        strategy=strategy,
        sequence_length=length,
        weights=weights,
        num_steps=num_steps,
        calibrates=calibrates,
        again=again,
    )


_small = partial(case, attention="eager", num_steps=_CPU_STEPS)
"""A case for the CPU."""


def cost_s(one: Case) -> float:
    """Return about how long a step takes on a large GPU, or on a CPU: what the cases are ordered by."""
    strategy = one.strategy
    _, _, parameters = MODELS[one.model]
    tokens = one.sequence_length if one.sequence_length > 1 else _IMAGE_TOKENS
    samples = (strategy.micro_batch_size or 1) * (strategy.gradient_accumulation_steps or 1)
    is_fp32 = strategy.precision is Precision.FP32
    fp32, sixteen_bit, num_bytes = _FP32_FLOPS_PER_S, _16BIT_FLOPS_PER_S, _BYTES_PER_S
    if one.model in _SMALL:
        fp32, sixteen_bit, num_bytes = _CPU_FP32_FLOPS_PER_S, _CPU_16BIT_FLOPS_PER_S, _CPU_BYTES_PER_S
    operations = _FORWARD_AND_BACKWARD + (_FORWARD_AGAIN if strategy.gradient_checkpointing else 0)
    compute_s = operations * parameters * tokens * samples / (fp32 if is_fp32 else sixteen_bit)
    return compute_s + parameters * _STEP_BYTES / num_bytes


def _smallest_first(cases: list[Case]) -> tuple[Case, ...]:
    return tuple(sorted(cases, key=cost_s))


_ONE_BY_ONE = "SGD steps one parameter after the other since"
_FROZEN = "the memory of frozen layers was off by 11 to 13 %"
WANTED: tuple[Case, ...] = (
    case(_BERT, (32, 128), "fp32", "sgd", again=_ONE_BY_ONE),
    case(_BERT, (32, 128), "fp16", "sgd", again=_ONE_BY_ONE),
    case(_T5, (4, 128), "fp32", "sgd", windows=2, again=_ONE_BY_ONE),
    case(_1B, (2, 1024), "bf16", "sgd", windows=4, again=_ONE_BY_ONE),
    case(_8B, (1, 1024), "bf16", "sgd", checkpoint_every=1, again=_ONE_BY_ONE),
    case(_GPT2, (8, 512), "autocast-bf16", freeze="embeddings+6", again=_FROZEN),
    case(_VIT, (32, 1), "autocast-fp16", freeze="embeddings+6", again=_FROZEN),
    case(_BERT, (32, 128), "fp32", freeze="embeddings+12", again=_FROZEN),
    case(_BERT, (4, 64), "autocast-bf16", lora=16),
    case(_1B, (1, 128), "bf16", lora=16),
    case(_8B, (1, 128), "bf16", lora=16),
    case(_1B, (2, 1024), "bf16", liger=True),
    case(_1B, (4, 1024), "bf16", lora=16, liger=True),
    case(_1B, (1, 512), "bf16", lora=16, is_packed=True),
    case(_8B, (1, 512), "bf16", lora=16, is_packed=True, checkpoint_every=1),
)
"""What an H200 of November 2026 left open, in the order in which it is wanted: SGD and frozen layers again,
the time of short steps under LoRA, Liger, packed bases."""
ACCURACY: tuple[Case, ...] = WANTED + _smallest_first(
    [
        case(_BERT, (1, 128)),
        case(_BERT, (1, 512)),
        case(_BERT, (8, 128), calibrates=True),
        case(_BERT, (8, 128), attention="eager"),
        case(_BERT, (8, 128), windows=4),
        case(_BERT, (32, 128), attention="eager"),
        case(_BERT, (32, 128), "autocast-bf16"),
        case(_BERT, (32, 128), "autocast-fp16"),
        case(_BERT, (32, 128), "bf16"),
        case(_BERT, (32, 128), "fp32", "8bit"),
        case(_BERT, (32, 128), "fp32", "adafactor"),
        case(_BERT, (32, 128), "fp32", "fused", checkpoint_every=1),
        case(_BERT, (32, 128), "fp32", checkpoint_every=2),
        case(_BERT, (64, 128), "fp32", "fused"),
        case(_BERT, (32, 256), "autocast-bf16", lora=16),
        case(_BERT, (16, 512), "fp32"),
        case(_BERT, (16, 512), "autocast-bf16", attention="eager"),
        case(_BERT, (64, 512), "bf16", "fused"),
        case(_BERT, (64, 512), "autocast-bf16", checkpoint_every=1),
        case(_GPT2, (1, 128)),
        case(_GPT2, (8, 512), "fp32", attention="eager"),
        case(_GPT2, (8, 512), "autocast-bf16", calibrates=True),
        case(_GPT2, (8, 512), "bf16", "fused"),
        case(_GPT2, (4, 1024), "autocast-fp16", "8bit"),
        case(_GPT2, (8, 512), "fp32", checkpoint_every=1),
        case(_GPT2, (4, 256), "fp32", "adafactor", windows=4),
        case(_T5, (8, 128)),
        case(_T5, (8, 512), "autocast-bf16"),
        case(_T5, (8, 256), "bf16", "adafactor"),
        case(_T5, (8, 256), "fp32", "fused", checkpoint_every=1),
        case(_T5, (8, 256), "autocast-bf16", lora=8),
        case(_VIT, (16, 1), calibrates=True),
        case(_VIT, (64, 1), "autocast-bf16"),
        case(_VIT_LARGE, (16, 1), "fp32", "fused", attention="eager"),
        case(_VIT_LARGE, (32, 1), "autocast-bf16", checkpoint_every=1),
        case(_VIT_LARGE, (64, 1), "bf16", "8bit"),
        case(_1B, (1, 512), "bf16", "fused", calibrates=True),
        case(_1B, (1, 512), "fp32"),
        case(_1B, (2, 1024), "autocast-bf16"),
        case(_1B, (4, 1024), "bf16", "adafactor", checkpoint_every=1),
        case(_1B, (4, 2048), "bf16", "8bit", checkpoint_every=1),
        case(_1B, (4, 1024), "bf16", lora=16),
        case(_8B, (1, 512), "bf16", lora=16, checkpoint_every=1),
        case(_8B, (6, 1024), "fp16", lora=16),
        case(_8B, (4, 2048), "bf16", lora=64, checkpoint_every=1),
        case(_8B, (1, 1024), "bf16", "adafactor", checkpoint_every=1),
    ]
)
"""For a GPU of 80 GB. BERT-large, GPT-2, T5, ViT, and Llamas of 1 and 8 billion parameters."""

ACCURACY_ON_CPU: tuple[Case, ...] = _smallest_first(
    [
        _small(_S_BERT, (8, 128), calibrates=True),
        _small(_S_BERT, (4, 64), "fp32", "fused", windows=2),
        _small(_S_BERT, (8, 64), "autocast-bf16", "8bit"),
        _small(_S_BERT, (8, 64), "fp32", "adafactor", checkpoint_every=1),
        _small(_S_GPT2, (1, 64), "bf16"),
        _small(_S_GPT2, (2, 32), "fp32", "sgd", freeze="embeddings+3"),
        _small(_S_GPT2, (2, 32), "autocast-bf16", lora=8),
        _small(_S_LLAMA, (1, 64), "fp32", "fused", attention="sdpa"),
        _small(_S_LLAMA, (2, 32), "bf16", "adafactor", windows=2),
        _small(_S_LLAMA, (2, 64), "bf16", lora=8, checkpoint_every=1),
        _small(_S_T5, (4, 64)),
        _small(_S_T5, (4, 64), "fp32", "sgd", checkpoint_every=1),
        _small(_S_VIT, (4, 1), "fp32", "fused", windows=2, attention="sdpa"),
    ]
)
"""A few seconds each on two cores. Predicted are CUDA's kernels, so what the CPU keeps for dropout is not: a
mask in the format of its input, where CUDA has one byte (aten/src/ATen/native/Dropout.cpp). Attention is
eager where there is dropout, as sdpa has no kernel with it on the CPU
(aten/src/ATen/native/transformers/sdp_utils_cpp.cpp)."""
