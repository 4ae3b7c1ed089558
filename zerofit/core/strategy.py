"""Strategy: everything that decides how much memory a training run needs, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from zerofit.core.validation import check_at_least


class Engine(StrEnum):
    """The library that manages parameters, gradients and optimizer states."""

    NATIVE = "native"
    """PyTorch: one process, or DistributedDataParallel over several."""
    DEEPSPEED = "deepspeed"
    FSDP2 = "fsdp2"
    """torch's fully_shard, as accelerate applies it (fsdp_version 2)."""


class StateDictType(StrEnum):
    """How FSDP2 saves weights and optimizer states, in accelerate's words (fsdp_state_dict_type)."""

    FULL = "FULL_STATE_DICT"
    """Rank 0 gathers whole tensors and writes one file."""
    SHARDED = "SHARDED_STATE_DICT"
    """Each rank writes its shards (torch.distributed.checkpoint)."""


class ZeroStage(IntEnum):
    """The states that DeepSpeed partitions over data-parallel ranks; each stage adds to the one before."""

    NOTHING = 0
    OPTIMIZER_STATES = 1
    GRADIENTS = 2
    PARAMETERS = 3


class OffloadDevice(StrEnum):
    """Where a partition is stored while the GPU does not need it."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class Precision(StrEnum):
    """The number format of forward and backward passes; master weights stay fp32."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class OptimizerName(StrEnum):
    """An optimizer that can replace the script's."""

    ADAMW = "adamw"
    """torch's, fused if available."""
    PAGED_ADAMW = "paged-adamw"
    """bitsandbytes' 32-bit AdamW, whose states the driver pages out to host memory when the GPU is full."""
    ADAMW_8BIT = "adamw-8bit"
    """bitsandbytes' AdamW with 8-bit states; embeddings keep 32 bits."""
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    LION = "lion"
    """bitsandbytes' Lion: one state; needs a learning rate three to ten times smaller than AdamW's
    (https://arxiv.org/abs/2302.06675, section 5)."""
    LION_8BIT = "lion-8bit"
    PAGED_LION_8BIT = "paged-lion-8bit"
    ADAFACTOR = "adafactor"
    SGD = "sgd"


DTYPES = {"float32": Precision.FP32, "float16": Precision.FP16, "bfloat16": Precision.BF16}
"""Formats by torch's names."""


class Quantization(StrEnum):
    """The storage format of frozen weights of linear layers."""

    NF4 = "nf4"
    """bitsandbytes' 4-bit normal float with doubly quantized scales, the base of QLoRA
    (https://arxiv.org/abs/2305.14314)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Sizes of ZeRO's communication and gather buffers, in elements, named as in DeepSpeed.

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
    """Parameters gathered at one time, at most."""
    stage3_max_reuse_distance: int = 1_000_000_000
    """A parameter needed again within this many parameters is not released."""
    sub_group_size: int = 1_000_000_000
    """Elements per optimizer sub-step."""


DEEPSPEEDS_BUCKETS = Buckets(reduce_bucket_size=500_000_000, allgather_bucket_size=500_000_000)
"""DeepSpeed's own defaults, of files that name no sizes (deepspeed 0.19.8, runtime/zero/config.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeBuffers:
    """Host buffers between the GPU and the NVMe disk, as zerofit configures them for DeepSpeed.

    The values are DeepSpeed's defaults (deepspeed/runtime/zero/offload_config.py). A pool must hold a
    gradient, a momentum, a variance and a weight buffer of the optimizer, and five parameter buffers, at a
    time.
    """

    optimizer_buffer_count: int = 4
    """offload_optimizer.buffer_count: each holds one fp32 tensor of the largest sub-group."""
    weight_buffer_count: int = 5
    """offload_param.buffer_count."""
    weight_buffer_size: int = 100_000_000
    """Elements of one of these: offload_param.buffer_size."""
    max_weights_in_cpu: int = 1_000_000_000
    """Elements of offloaded weights that stay in host memory: offload_param.max_in_cpu."""


NVME = NvmeBuffers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters, in peft's terms."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    """Names of the modules that get an adapter; empty uses peft's default for the model family."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are fully trained, as a copy beside the frozen original."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "rank", "alpha")
        check_at_least(self, 0, "dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How a run trains, as far as memory depends on it. None means "as the script sets it"."""

    engine: Engine = Engine.NATIVE
    """The library that runs the training step."""
    zero_stage: ZeroStage = ZeroStage.NOTHING
    """States partitioned over the data-parallel ranks; above 0 only with DeepSpeed."""
    optimizer_offload: OffloadDevice = OffloadDevice.NONE
    """Where optimizer states and fp32 master weights are stored, and where the step runs. FSDP2's offload
    moves both: there it equals param_offload."""
    param_offload: OffloadDevice = OffloadDevice.NONE
    """Where each rank's parameter shard is stored between uses; ZeRO-3 and FSDP2 only."""
    nvme_path: str | None = None
    """Folder on the NVMe disk for data offloaded to nvme."""
    pin_memory: bool = True
    """True if offload buffers are page-locked: faster copies, but not swappable."""
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
    """One in this many blocks is checkpointed: 1 is every block, 2 every second."""
    activation_offload: bool = False
    """True if the inputs that checkpointed blocks keep for their recomputation are stored in pinned host
    memory; False leaves them where the script has them. Only with gradient_checkpointing."""
    optimizer: OptimizerName | None = None
    """The optimizer that replaces the script's."""
    attention: str | None = None
    """transformers' attn_implementation."""
    compile: bool = False
    """True if the model is compiled with torch.compile."""
    freeze: tuple[str, ...] = ()
    """Name patterns of frozen parameters, or keywords for them (zerofit/core/freezing.py)."""
    lora: Lora | None = None
    """Adapters that train in place of the weights."""
    quantization: Quantization | None = None
    """Format of the frozen base weights under adapters."""
    quant_storage: Precision | None = None
    """The dtype that 4-bit weights are stored in, as transformers' bnb_4bit_quant_storage; None is uint8,
    which FSDP2 does not shard."""
    tf32: bool | None = None
    """True if fp32 matrix products use tf32 on tensor cores."""
    liger: bool = False
    """True if Liger's kernels replace transformers' modules."""
    group_by_length: bool = False
    """True if batches contain samples of similar length."""
    buckets: Buckets = field(default_factory=Buckets)
    """ZeRO's buffer sizes."""
    reshard_after_forward: bool = True
    """FSDP2: True if a unit's gathered weights are freed after its forward pass and gathered again for the
    backward pass, as under ZeRO-3; False keeps them, as under ZeRO-2."""
    state_dict_type: StateDictType = StateDictType.SHARDED
    """FSDP2: what a checkpoint holds; accelerate's default for version 2."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "micro_batch_size", "gradient_accumulation_steps", "checkpoint_every")
        check_at_least(self, 0, "gradient_clipping")

    @property
    def offloads(self) -> bool:
        """True if anything is offloaded from the GPU."""
        return (self.optimizer_offload, self.param_offload) != (OffloadDevice.NONE, OffloadDevice.NONE)

    @property
    def clips_gradients(self) -> bool:
        """True if the gradient norm is computed and clipped.

        Assumed where the script decides: Trainer clips at 1.0 by default (transformers/training_args.py,
        max_grad_norm).
        """
        return self.gradient_clipping != 0

    @property
    def samples_per_step(self) -> int:
        """Samples of one rank in an optimizer step; sizes that are not known count as 1."""
        return (self.micro_batch_size or 1) * (self.gradient_accumulation_steps or 1)

    @property
    def uses_nvme(self) -> bool:
        """True if anything is offloaded to NVMe."""
        return OffloadDevice.NVME in (self.optimizer_offload, self.param_offload)


def describe_strategy(strategy: Strategy) -> str:
    """Return a strategy in a few words."""
    if strategy.engine is Engine.NATIVE:
        words = ["PyTorch without DeepSpeed"]
    elif strategy.engine is Engine.FSDP2:
        words = ["FSDP2" if strategy.reshard_after_forward else "FSDP2 without resharding"]
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
    """Return a field's value as displayed."""
    if isinstance(value, ZeroStage):
        return str(value.value)
    if isinstance(value, Lora):
        return adapter_words(value)
    if isinstance(value, tuple):
        return ", ".join(value) or "nothing"
    return "on" if value is True else "off" if value is False else str(value)


def adapter_words(lora: Lora) -> str:
    """Return a description of adapters: "rank 16, alpha 32, in q_proj, v_proj"."""
    words = [f"rank {lora.rank}", f"alpha {lora.alpha}"]
    if lora.dropout:
        words.append(f"dropout {lora.dropout:g}")
    if lora.target_modules:
        words.append(f"in {', '.join(lora.target_modules)}")
    if lora.modules_to_save:
        words.append(f"and {', '.join(lora.modules_to_save)} whole")
    return ", ".join(words)
