"""AllocationLog: what one micro-batch allocates and frees on a GPU, in order, as a function of its size."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from zerofit.core.strategy import Lora, Precision, Quantization


class TensorKind(StrEnum):
    """The purpose of a storage."""

    INPUT = "inputs"
    """The batch itself."""
    ACTIVATION = "activations"
    """Made in the forward pass."""
    RECOMPUTED = "recomputed activations"
    """Made by gradient checkpointing's second forward pass, inside the backward pass."""
    OUTPUT = "outputs"
    """The model's outputs: loss, logits and whatever else the script holds on to."""
    ACTIVATION_GRADIENT = "activation gradients"
    """Made in the backward pass, and no parameter's gradient."""
    GRADIENT = "gradients"
    """The gradient of a parameter, from its birth in the backward pass."""
    WORKSPACE = "kernel workspaces"
    """Scratch memory that a CUDA kernel takes and gives back."""


class Event(IntEnum):
    """Kinds of events; each comes with one number, its argument."""

    ALLOCATE = 0
    """A storage is born; the argument is its index."""
    FREE = 1
    """A storage dies; the argument is its index. Gradients live on past the log's end."""
    FORWARD_ENTER = 2
    """A module's forward begins, the first or, in checkpointing, the second time; its index in modules."""
    FORWARD_LEAVE = 3
    """A module's forward has ended."""
    BACKWARD_ENTER = 4
    """The backward pass reaches a module's outputs."""
    BACKWARD_LEAVE = 5
    """The backward pass has left a module's inputs."""
    GRADIENT_READY = 6
    """A parameter's gradient is whole; its index in parameters. At most once a parameter."""
    FORWARD_ENDS = 7
    """The loss is there and the backward pass begins; the argument is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedParameter:
    """One parameter, a tied one once."""

    name: str
    num_elements: int
    bytes_per_element: int
    """Of the weights as they lie in the forward pass."""
    trains: bool
    module: int
    """Index in modules of the one that holds it; for a tied one the first."""
    shape: tuple[int, ...] = ()
    """Its dimensions; empty where they are not known."""
    is_embedding: bool = False
    """True if an nn.Embedding holds it, be it alone or with a head that shares it."""
    is_packed: bool = False
    """True if its elements are bytes that hold several quantized weights each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storages:
    """The storages of a log as columns; a storage takes fixed_bytes + bytes_per_sample * micro_batch_size."""

    kinds: tuple[TensorKind, ...]
    fixed_bytes: tuple[int, ...]
    bytes_per_sample: tuple[int, ...]
    modules: tuple[int, ...]
    """Index in modules of the innermost one that ran when the storage was born; -1 outside of all."""
    operators: tuple[int, ...]
    """Index in operators of the one that made it."""


COLLECTIVES = "collectives"
"""The namespace of operators that stand for collectives of ranks which share samples."""
EXPERT_ROWS = 64
"""Rows of an expert's product that hold no token: half a tile, as its last one is full by chance only.
Tiles have 128 rows on Hopper (aten/src/ATen/native/cuda/GroupMM.cu)."""


class CostKind(StrEnum):
    """The resource that bounds an operator's time."""

    MATMUL = "matmul"
    GROUPED = "grouped"
    """Products of experts: each meets the rows of its own tokens."""
    ATTENTION = "attention"
    MEMORY = "memory"
    """Everything else: as long as its bytes take."""
    EXCHANGE = "exchange"
    """A collective of the ranks that share samples: as long as the link between them takes."""


class Pass(StrEnum):
    """Where in the micro-batch an operator runs."""

    FORWARD = "forward"
    RECOMPUTATION = "recomputation"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """Alike calls of one operator: each does fixed + per_sample * micro_batch_size of work."""

    operator: str
    kind: CostKind
    during: Pass
    precision: Precision
    """Number format of its inputs."""
    count: int
    """Times that it runs in one micro-batch."""
    fixed_flops: int
    flops_per_sample: int
    fixed_bytes: int
    """Read and written; of a collective, what one rank puts in."""
    bytes_per_sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationLog:
    """One forward and backward pass on one GPU, without the model's own weights and any engine's buffers."""

    least_micro_batch_size: int
    """The sizes below it have another log."""
    modules: tuple[str, ...]
    """Qualified names; "" is the model."""
    module_parameters: tuple[tuple[int, ...], ...]
    """The parameters that each module holds itself, as indices in parameters; a tied one with each holder."""
    parameters: tuple[TracedParameter, ...]
    """In the order of model.parameters()."""
    buffer_bytes: tuple[int, ...]
    """Buffers of the model that lie on the GPU all along."""
    storages: Storages
    operators: tuple[str, ...]
    codes: bytes
    """The events' kinds (Event), one byte each."""
    arguments: tuple[int, ...]
    """The events' arguments, as many as codes."""
    gradient_storages: tuple[int, ...]
    """The storage of each parameter's gradient; -1 where it gets none."""
    costs: tuple[OperatorCost, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How linear layers with weights of 4 bits are made; the defaults are transformers' with bitsandbytes."""

    two_levels: bool = True
    """True if the scales are quantized again."""
    with_head: bool = False
    """True if the head of a language model is packed too."""
    saves_inputs: bool = False
    """True if each layer keeps its input for the backward pass, as bitsandbytes up to 0.43.0 did
    (autograd/_functions.py, MatMul4Bit; 0.43.3 does not)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """All that decides a log, beside the model's configuration, its task and the versions."""

    sequence_length: int
    """Tokens of a sample; for an encoder-decoder, of its source."""
    target_length: int | None = None
    """Tokens of an encoder-decoder's target; None takes sequence_length."""
    is_padded: bool = True
    """True if the attention mask has padding in it."""
    weights: Precision = Precision.FP32
    """Format of the weights in the forward pass, adapters left out."""
    adapters: Precision = Precision.FP32
    """Format of LoRA's adapters: fp32 as peft makes them, or the weights' where DeepSpeed casts all."""
    saved_modules: Precision = Precision.FP32
    """Format of modules that train whole beside adapters: fp32 as zerofit makes them, or the weights' as peft
    leaves them."""
    autocast: Precision | None = None
    """Format of torch.autocast; None without it."""
    gradient_checkpointing: bool = False
    checkpoint_every: int = 1
    """Of the blocks that could, one in so many recomputes."""
    attention: str | None = None
    """transformers' attn_implementation; None leaves it to transformers (sdpa where the class has it)."""
    compute_capability: tuple[int, int] = (8, 0)
    """Of the GPU, which decides the kernel that attention takes."""
    freeze: tuple[str, ...] = ()
    """Name patterns of the parameters that do not train."""
    lora: Lora | None = None
    quantization: Quantization | None = None
    """Format of the frozen weights of linear layers."""
    packing: Packing = Packing()
    """How the quantized layers are made."""
    keeps_outputs: bool = True
    """True if the loop holds the outputs through the backward pass, as a plain `outputs = model(**batch)`
    does; transformers' Trainer lets go of them once it has the loss."""
    saves_linear_inputs: bool = False
    """True if every linear layer keeps its input for the backward pass, one with frozen weights too, as
    DeepSpeed's own linear function of stage 3 does."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer; the log is that of the first."""
    sequence_parallel_size: int = 1
    """Ranks that share the tokens of a sample; the log is that of the first."""
    softmax_saves_input: bool = False
    """True if softmax keeps its input beside its result, as PyTorch up to 1.10 did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The logs of one model under one request."""

    request: TraceRequest
    logs: tuple[AllocationLog, ...]
    """By falling least_micro_batch_size; the last one's is 1."""
    notes: tuple[str, ...] = ()
    """Parts of the training that it leaves out, one sentence each."""

    def log_for(self, micro_batch_size: int) -> AllocationLog:
        """Return the log that holds for this many samples."""
        return next(log for log in self.logs if log.least_micro_batch_size <= micro_batch_size)
