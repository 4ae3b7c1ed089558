"""Strategy: everything that decides where a training run's memory goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from zerofit.core.validation import check_at_least


class Engine(StrEnum):
    """The library that holds parameters, gradients and optimizer states."""

    NATIVE = "native"
    """PyTorch: one process, or DistributedDataParallel over several."""
    DEEPSPEED = "deepspeed"


class ZeroStage(IntEnum):
    """The states that DeepSpeed partitions over data-parallel ranks; each stage adds to the one before."""

    NOTHING = 0
    OPTIMIZER_STATES = 1
    GRADIENTS = 2
    PARAMETERS = 3


class OffloadDevice(StrEnum):
    """Where a partition rests while the GPU does not need it."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class Precision(StrEnum):
    """The number format of forward and backward; master weights stay fp32."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class OptimizerName(StrEnum):
    """An optimizer that zerofit can put in the place of the script's."""

    ADAMW = "adamw"
    """torch's, fused where there is a fused one."""
    PAGED_ADAMW = "paged-adamw"
    """bitsandbytes' 32-bit AdamW, whose states the GPU's driver moves to host memory when it is full."""
    ADAMW_8BIT = "adamw-8bit"
    """bitsandbytes' AdamW with states of 8 bits; embeddings keep 32."""
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    LION = "lion"
    """bitsandbytes' Lion: one state; it wants a learning rate three to ten times smaller than AdamW's
    (https://arxiv.org/abs/2302.06675, section 5)."""
    LION_8BIT = "lion-8bit"
    PAGED_LION_8BIT = "paged-lion-8bit"
    ADAFACTOR = "adafactor"
    SGD = "sgd"


DTYPES = {"float32": Precision.FP32, "float16": Precision.FP16, "bfloat16": Precision.BF16}
"""Formats by torch's names."""


class Quantization(StrEnum):
    """The format in which frozen weights of linear layers rest between their uses."""

    NF4 = "nf4"
    """bitsandbytes' 4-bit normal float with doubly quantized scales, the base of QLoRA
    (https://arxiv.org/abs/2305.14314)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Sizes of ZeRO's communication and gather buffers, in elements, as DeepSpeed names them.

    The stage 3 defaults are DeepSpeed's own (deepspeed/runtime/zero/config.py).
    """

    reduce_bucket_size: int = 50_000_000
    """Elements reduced in one message. DeepSpeed's default of 5e8 holds 1 GB in bf16 for the whole run at
    stage 3; 5e7 (100 MB) is its own prefetch size. ASSUMPTION: 100 MB messages still fill the link."""
    allgather_bucket_size: int = 50_000_000
    """Elements gathered in one message after a step, stages 1 and 2."""
    stage3_prefetch_bucket_size: int = 50_000_000
    """Elements gathered ahead of their use."""
    stage3_param_persistence_threshold: int = 100_000
    """Parameters smaller than this stay whole on every rank."""
    stage3_max_live_parameters: int = 1_000_000_000
    """Parameters gathered at one time at most."""
    stage3_max_reuse_distance: int = 1_000_000_000
    """A parameter needed again within this many parameters is not released."""
    sub_group_size: int = 1_000_000_000
    """Elements the optimizer steps at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeBuffers:
    """Buffers in host memory between the GPU and the NVMe disk, as zerofit writes them for DeepSpeed.

    They are DeepSpeed's own defaults (deepspeed/runtime/zero/offload_config.py). A pool must hold a gradient,
    a momentum, a variance and a weight buffer of the optimizer, and five parameter buffers, at a time.
    """

    optimizer_buffer_count: int = 4
    """offload_optimizer.buffer_count: each holds one fp32 tensor of the largest sub-group."""
    weight_buffer_count: int = 5
    """offload_param.buffer_count."""
    weight_buffer_size: int = 100_000_000
    """Elements of one of these: offload_param.buffer_size."""
    max_weights_in_cpu: int = 1_000_000_000
    """Elements that stay in host memory though weights are offloaded: offload_param.max_in_cpu."""


NVME = NvmeBuffers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters, in peft's terms."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    """Names of the modules that get an adapter; empty leaves the choice to peft's table for the family."""
    modules_to_save: tuple[str, ...] = ()
    """Names of the modules that train whole, as a copy beside the frozen original."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "rank", "alpha")
        check_at_least(self, 0, "dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Where the memory of one run goes. None stands for "as the script says"."""

    engine: Engine = Engine.NATIVE
    """The engine of the training step."""
    zero_stage: ZeroStage = ZeroStage.NOTHING
    """The states partitioned over the data-parallel ranks; above 0 only under DeepSpeed."""
    optimizer_offload: OffloadDevice = OffloadDevice.NONE
    """Where each rank's optimizer states and fp32 master weights live, and where the step runs."""
    param_offload: OffloadDevice = OffloadDevice.NONE
    """Where each rank's parameter shard lives between uses; stage 3 only."""
    nvme_path: str | None = None
    """Folder on the NVMe disk that takes what is offloaded to nvme."""
    pin_memory: bool = True
    """True if offloaded buffers are page-locked: faster copies, memory that can't be swapped out."""
    precision: Precision | None = None
    """Format of forward and backward."""
    micro_batch_size: int | None = None
    """Samples per rank in one forward pass."""
    gradient_accumulation_steps: int | None = None
    """Forward passes per rank in one optimizer step."""
    gradient_clipping: float | None = None
    """Largest norm of all gradients together; 0 turns clipping off."""
    gradient_checkpointing: bool | None = None
    """True if activations are recomputed in the backward pass instead of kept."""
    checkpoint_every: int = 1
    """Of the blocks of a model that recomputes activations, one in so many does: 1 is each, 2 each second."""
    optimizer: OptimizerName | None = None
    """The optimizer that takes the place of the script's."""
    attention: str | None = None
    """transformers' attn_implementation."""
    compile: bool = False
    """True if the model goes through torch.compile."""
    freeze: tuple[str, ...] = ()
    """Name patterns of the parameters that do not train, or words for them (zerofit/core/freezing.py)."""
    lora: Lora | None = None
    """Adapters that train in place of the weights."""
    quantization: Quantization | None = None
    """Format of the frozen weights beside adapters."""
    tf32: bool | None = None
    """True if fp32 matrix products round their inputs to tf32 on tensor cores."""
    liger: bool = False
    """True if Liger's kernels take the place of transformers' modules."""
    group_by_length: bool = False
    """True if batches are made of samples of like length."""
    buckets: Buckets = field(default_factory=Buckets)
    """ZeRO's buffer sizes."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "micro_batch_size", "gradient_accumulation_steps", "checkpoint_every")
        check_at_least(self, 0, "gradient_clipping")

    @property
    def offloads(self) -> bool:
        """True if anything rests outside the GPU."""
        return (self.optimizer_offload, self.param_offload) != (OffloadDevice.NONE, OffloadDevice.NONE)

    @property
    def clips_gradients(self) -> bool:
        """True if the norm of all gradients is taken and clipped.

        Taken to be so where the script decides: Trainer clips at 1.0 unless it is told otherwise
        (transformers/training_args.py, max_grad_norm).
        """
        return self.gradient_clipping != 0

    @property
    def uses_nvme(self) -> bool:
        """True if anything rests on the NVMe disk."""
        return OffloadDevice.NVME in (self.optimizer_offload, self.param_offload)


def describe_strategy(strategy: Strategy) -> str:
    """Return a strategy in a few words."""
    if strategy.engine is Engine.NATIVE:
        words = ["PyTorch without DeepSpeed"]
    else:
        words = [f"DeepSpeed ZeRO-{strategy.zero_stage.value}"]
    if strategy.optimizer_offload is not OffloadDevice.NONE:
        words.append(f"optimizer on {strategy.optimizer_offload.value}")
    if strategy.param_offload is not OffloadDevice.NONE:
        words.append(f"parameters on {strategy.param_offload.value}")
    if strategy.precision is not None:
        words.append(strategy.precision.value)
    if strategy.compile:
        words.append("compiled")
    return ", ".join(words)


def show(value: object) -> str:
    """Return a field's value as a person reads it."""
    if isinstance(value, ZeroStage):
        return str(value.value)
    if isinstance(value, Lora):
        return adapter_words(value)
    if isinstance(value, tuple):
        return ", ".join(value) or "nothing"
    return "on" if value is True else "off" if value is False else str(value)


def adapter_words(lora: Lora) -> str:
    """Return how adapters look: "rank 16, alpha 32, in q_proj, v_proj"."""
    words = [f"rank {lora.rank}", f"alpha {lora.alpha}"]
    if lora.dropout:
        words.append(f"dropout {lora.dropout:g}")
    if lora.target_modules:
        words.append(f"in {', '.join(lora.target_modules)}")
    if lora.modules_to_save:
        words.append(f"and {', '.join(lora.modules_to_save)} whole")
    return ", ".join(words)
