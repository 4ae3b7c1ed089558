"""AllocationLog: what one micro-batch allocates and frees on a GPU, in order, as functions of its size."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from zerofit.core.strategy import Lora, Precision, Quantization


class TensorKind(StrEnum):
    """The purpose of a storage."""

    INPUT = "inputs"
    """The batch."""
    ACTIVATION = "activations"
    """Allocated in the forward pass."""
    RECOMPUTED = "recomputed activations"
    """Allocated in the backward pass, by the second forward pass of gradient checkpointing."""
    OUTPUT = "outputs"
    """Outputs of the model: loss, logits and whatever else the script keeps."""
    ACTIVATION_GRADIENT = "activation gradients"
    """Allocated in the backward pass; not a parameter's gradient."""
    GRADIENT = "gradients"
    """The gradient of a parameter, from its allocation in the backward pass."""
    SUM = "gradient sums"
    """The sum of two gradients of one tensor, while both are still there, where the first is a view. What is
    left of it afterwards counts as the first."""
    KEPT = "kept predictions"
    """Predictions and labels of an evaluated batch, which Trainer keeps for compute_metrics."""
    CACHE = "key-value cache"
    """Keys and values, or states, of earlier tokens, which a model keeps to generate the next one."""
    WORKSPACE = "kernel workspaces"
    """Scratch memory of a CUDA kernel, freed when the kernel ends."""
    GATHERED = "gathered weights"
    """Whole weights of an FSDP2 unit, from its all-gather to its reshard."""
    GATHER_BUFFER = "all-gather buffer"
    """Input and output of an FSDP2 unit's all-gather, until they are copied into its weights."""
    REDUCE_BUFFER = "reduce-scatter buffers"
    """Input of an FSDP2 unit's reduce-scatter, and its output if that is cast to another format."""


class Event(IntEnum):
    """Kinds of events; each has one integer argument."""

    ALLOCATE = 0
    """A storage is allocated; the argument is its index."""
    FREE = 1
    """A storage is freed; the argument is its index. Gradients outlive the log."""
    FORWARD_ENTER = 2
    """A module's forward begins (again, if checkpointed); the argument is its index in modules."""
    FORWARD_LEAVE = 3
    """A module's forward has ended."""
    BACKWARD_ENTER = 4
    """The backward pass reaches a module's outputs."""
    BACKWARD_LEAVE = 5
    """The backward pass has left a module's inputs."""
    GRADIENT_READY = 6
    """A parameter's gradient is complete; the argument is its index in parameters. At most once per
    parameter."""
    FORWARD_ENDS = 7
    """The forward pass has returned the loss and the backward pass begins; the argument is 0."""
    BACKWARD_ENDS = 9
    """A micro-batch is over, in a log of an optimizer step; the argument is 0. 8 is raw.CALL."""
    LAYERS_END = 10
    """The backward pass has left all layers, and FSDP2 ends it; the argument is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedParameter:
    """One parameter; tied parameters are listed once."""

    name: str
    num_elements: int
    bytes_per_element: int
    """Bytes per element of the weights in the forward pass."""
    trains: bool
    module: int
    """Index in modules of the module that owns it; the first one for tied parameters."""
    shape: tuple[int, ...] = ()
    """Its dimensions; empty if unknown."""
    is_embedding: bool = False
    """True if an nn.Embedding owns it, alone or tied to a head."""
    is_packed: bool = False
    """True if each byte packs several quantized weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storages:
    """The storages of a log as columns; sizes are fixed_bytes + bytes_per_sample * micro_batch_size."""

    kinds: tuple[TensorKind, ...]
    fixed_bytes: tuple[int, ...]
    bytes_per_sample: tuple[int, ...]
    modules: tuple[int, ...]
    """Index in modules of the innermost module running when the storage was allocated; -1 if none was."""
    operators: tuple[int, ...]
    """Index in operators of the operator that allocated it."""
    streams: tuple[int, ...] = ()
    """Number of the CUDA stream that allocated it, 0 the default one; empty if all are on that."""


COLLECTIVES = "collectives"
"""The namespace of operators that stand for collectives of ranks which share samples."""
EXPERT_ROWS = 64
"""Padding rows of an expert's matrix product: half a tile on average, since the last tile is partly filled.
Tiles have 128 rows on Hopper (aten/src/ATen/native/cuda/GroupMM.cu)."""


class CostKind(StrEnum):
    """The resource that bounds an operator's time."""

    MATMUL = "matmul"
    GROUPED = "grouped"
    """Matrix products of experts: each expert multiplies the rows of its own tokens."""
    ATTENTION = "attention"
    MEMORY = "memory"
    """Everything else: bound by the bytes it reads and writes."""
    EXCHANGE = "exchange"
    """A collective of the ranks that share samples: bound by the link between them."""
    COLLECTIVE = "collective"
    """A collective of FSDP2, which runs beside the computation; its bytes are those of its input."""
    HOST_COPY = "host copy"
    """A saved tensor's copy to the host, or back: bound by the link between GPU and host."""


class Pass(StrEnum):
    """Where in the micro-batch an operator runs."""

    FORWARD = "forward"
    RECOMPUTATION = "recomputation"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """Calls of one operator with equal cost: each does fixed + per_sample * micro_batch_size of work."""

    operator: str
    kind: CostKind
    during: Pass
    precision: Precision
    """Number format of its inputs."""
    count: int
    """Calls per micro-batch."""
    fixed_flops: int
    flops_per_sample: int
    fixed_bytes: int
    """Bytes read and written; for a collective, the input of one rank."""
    bytes_per_sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What rank 0 holds of one parameter under FSDP2."""

    shape: tuple[int, ...]
    """Of the shard."""
    num_elements: int
    """With padding."""
    bytes_per_element: int
    """4 for weights that train in mixed precision: the shards are the master weights."""
    unit: int
    """Number of the unit that gathers it, in the order in which they are made; -1 if it is not sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """The allocations of a gathered state dict, as sizes of its blocks and their entries."""

    sizes: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()
    """block + 1 where it is allocated, -(block + 1) where it is freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationLog:
    """One forward and backward pass on one GPU, without the model's weights and the engine's buffers.

    Under FSDP2 it is those of all micro-batches of an optimizer step, with what the engine allocates in them.
    """

    least_micro_batch_size: int
    """Smallest micro-batch size that this log holds for."""
    modules: tuple[str, ...]
    """Qualified names; "" is the model."""
    module_parameters: tuple[tuple[int, ...], ...]
    """Indices in parameters of the parameters that each module owns directly; a tied one is listed for each
    owner."""
    parameters: tuple[TracedParameter, ...]
    """In the order of model.parameters()."""
    buffer_bytes: tuple[int, ...]
    """Bytes of the model's buffers, which stay on the GPU."""
    storages: Storages
    operators: tuple[str, ...]
    codes: bytes
    """The events' kinds (Event), one byte each."""
    arguments: tuple[int, ...]
    """The events' arguments, as many as codes."""
    gradient_storages: tuple[int, ...]
    """The storage of each parameter's gradient; -1 if it gets none."""
    costs: tuple[OperatorCost, ...]
    """Of one micro-batch."""
    shards: tuple[Shard, ...] = ()
    """Of each parameter under FSDP2; empty without it."""
    save: Save = Save()
    """Of a full state dict under FSDP2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How 4-bit linear layers are built; the defaults are those of transformers with bitsandbytes."""

    stored_in: Precision | None = None
    """The dtype that packed weights are stored in; None for uint8."""
    two_levels: bool = True
    """True if the scales are quantized too (double quantization)."""
    with_head: bool = False
    """True if the head of a language model is quantized too."""
    saves_inputs: bool = False
    """True if each layer keeps its input for the backward pass, as bitsandbytes up to 0.43.0 did
    (autograd/_functions.py, MatMul4Bit; 0.43.3 does not)."""
    unpacks_to: Precision | None = None
    """Format that a whole weight is unpacked to before it is cast to that of the inputs; None for theirs at
    once. bitsandbytes unpacks to the format that it packed from, which up to 0.42.0 was fp16 for all
    (nn/modules.py, Params4bit; autograd/_functions.py, MatMul4Bit)."""


class FusedKernel(StrEnum):
    """A kernel that replaces operators of a transformers model, named as Liger names it."""

    ROPE = "rope"
    RMS_NORM = "rms_norm"
    SWIGLU = "swiglu"
    """Gated feed-forward blocks, also with GELU."""
    CROSS_ENTROPY = "cross_entropy"
    """A loss of whole logits, which become their own gradient."""
    FUSED_LINEAR_CROSS_ENTROPY = "fused_linear_cross_entropy"
    """Head and loss of a piece of the tokens after another; whole logits never exist."""
    FIRST_FUSED_LINEAR_CROSS_ENTROPY = "first_fused_linear_cross_entropy"
    """The same as in Liger's releases of 2024, with hidden states shifted into a copy and logits in fp32, and
    in fms-acceleration, which runs a copy of it."""


LIGER = (
    FusedKernel.ROPE,
    FusedKernel.RMS_NORM,
    FusedKernel.SWIGLU,
    FusedKernel.FUSED_LINEAR_CROSS_ENTROPY,
)
"""What Liger replaces where it is not told otherwise (liger_kernel/transformers/monkey_patch.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How FSDP2 runs in a trace, as rank 0 of all ranks."""

    shard_size: int
    """Ranks that share one copy of the weights."""
    copies: int = 1
    """Copies of the sharded weights."""
    reshard_after_forward: bool = True
    precision: Precision | None = None
    """accelerate's mixed precision; None is "no"."""
    cpu_offload: bool = False
    micro_batches: int = 1
    """Forward passes of the traced optimizer step."""
    syncs_each_batch: bool = False
    """True if gradients are reduced after each of them, as accelerate's sync_each_batch does; else after the
    last alone."""
    saves_whole: bool = False
    """True if the log must tell what a full state dict allocates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """Everything that determines a log, beside the model's configuration, its task and the versions."""

    sequence_length: int
    """Tokens per sample; for an encoder-decoder, of the source."""
    target_length: int | None = None
    """Tokens of an encoder-decoder's target; None means sequence_length."""
    is_padded: bool = True
    """True if the attention mask contains padding."""
    weights: Precision = Precision.FP32
    """Format of the weights in the forward pass, without adapters."""
    adapters: Precision = Precision.FP32
    """Format of LoRA's adapters: fp32 as peft creates them, or the weights' format if DeepSpeed casts them.
    """
    saved_modules: Precision = Precision.FP32
    """Format of fully trained modules beside adapters: fp32 under zerofit, or the weights' format as in peft.
    """
    autocast: Precision | None = None
    """Format of torch.autocast; None without autocast."""
    gradient_checkpointing: bool = False
    checkpoint_every: int = 1
    """One in this many checkpointable blocks is recomputed."""
    activation_offload: bool = False
    """True if the inputs of recomputed blocks are saved on the host."""
    attention: str | None = None
    """transformers' attn_implementation; None means transformers' default (sdpa if the class supports it)."""
    compute_capability: tuple[int, int] = (8, 0)
    """Compute capability of the GPU, which decides the attention kernel."""
    freeze: tuple[str, ...] = ()
    """Name patterns of the parameters that do not train."""
    lora: Lora | None = None
    quantization: Quantization | None = None
    """Format of the frozen weights of linear layers."""
    packing: Packing = Packing()
    """How the quantized layers are made."""
    base_bits: float = 0.0
    """Bits of a weight, with its scales, in the packed layers of a checkpoint that is quantized itself; 0 for
    plain weights. Closed forms need it; the model's configuration says it to a trace."""
    sharding: Sharding | None = None
    """How FSDP2 shards the model; None without it."""
    keeps_outputs: bool = True
    """True if the loop holds the outputs through the backward pass, as a plain `outputs = model(**batch)`
    does; Trainer drops them once it has the loss."""
    saves_linear_inputs: bool = False
    """True if every linear layer keeps its input for the backward pass, even with frozen weights, as
    DeepSpeed's linear function for ZeRO-3 does."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer; the log is that of the first."""
    sequence_parallel_size: int = 1
    """Ranks that share the tokens of a sample; the log is that of the first."""
    pipeline_parallel_size: int = 1
    """Ranks that the model's blocks are divided among; the log is that of one."""
    pipeline_place: int = 0
    """Which of them, counted from 0: the first of its stages."""
    stage_blocks: tuple[int, ...] = ()
    """Blocks of each stage, a multiple of the ranks; empty where they are shared by time alone."""
    kernels: tuple[FusedKernel, ...] = ()
    """What fused kernels replace in transformers' models."""
    evaluates: bool = False
    """True for a Trainer's evaluation of a batch, without gradients; False for a training step."""
    softmax_saves_input: bool = False
    """True if softmax saves its input as well as its output, as in PyTorch up to 1.10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The logs of one model for one request."""

    request: TraceRequest
    logs: tuple[AllocationLog, ...]
    """In descending order of least_micro_batch_size; the last one's is 1."""
    notes: tuple[str, ...] = ()
    """Parts of the training that were not traced, one sentence each."""

    def log_for(self, micro_batch_size: int) -> AllocationLog:
        """Return the log for this micro-batch size."""
        return next(log for log in self.logs if log.least_micro_batch_size <= micro_batch_size)
