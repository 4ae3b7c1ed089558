"""Facts known before planning: the model, the machine, the workload, the versions."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.core.validation import check_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The dimensions of a model, as its config.json names them."""

    name: str
    """The hub id, folder or catalog name that the facts come from."""
    model_type: str
    """transformers' architecture family, such as "llama"."""
    num_parameters: int
    """All parameters; tied ones count once."""
    num_trainable_parameters: int
    """Parameters that get gradients."""
    num_layers: int
    """Transformer blocks; encoder and decoder together."""
    hidden_size: int
    """Width of the residual stream."""
    vocab_size: int
    """Rows of the token embedding; 0 for models without tokens."""
    max_sequence_length: int | None = None
    """Maximum number of positions; None if unlimited."""
    has_rotary_positions: bool = False
    """True if positions are computed as rotations for samples of any length, also beyond the maximum."""
    architecture: str = ""
    """transformers' class with its task head, such as "LlamaForCausalLM"; empty if unknown."""
    intermediate_size: int = 0
    """Width inside one feed-forward block (of one expert, in a mixture); 0 if unknown."""
    num_attention_heads: int = 0
    """Query heads per layer; 0 if unknown."""
    num_key_value_heads: int = 0
    """Key and value heads per layer, fewer than query heads with grouped-query attention; 0 if unknown."""
    head_dim: int = 0
    """Width of one head; 0 if unknown."""
    num_decoder_layers: int = 0
    """How many of num_layers are decoder layers that attend to an encoder; 0 without an encoder."""
    num_experts: int = 0
    """Experts per MoE layer; 0 for dense models."""
    num_experts_per_token: int = 0
    """Experts that each token is routed to."""
    is_gated: bool = False
    """True if the feed-forward block is gated: three matrices rather than two."""
    is_causal: bool = False
    """True if its head predicts the next token, with a decoder-only model."""
    num_largest_layer_parameters: int = 0
    """Parameters of the largest transformer block; 0 if unknown."""
    largest_parameter: int = 0
    """Elements of the largest single parameter: the token embedding, or a layer's experts if transformers
    stores them as one tensor; 0 if unknown."""
    checkpoint_dtype: str = ""
    """dtype of the published weights according to config.json or the weight files, such as "bfloat16";
    transformers loads the model in it by default. Empty if unknown."""
    source_positions: int = 0
    """Positions of an encoder without tokens: image patches plus the class token, or audio frames; else 0."""

    @property
    def hears(self) -> bool:
        """True if its encoder takes audio, so that its tokens are those of the decoder's text alone."""
        return self.source_positions > 0 and self.num_decoder_layers > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU."""

    name: str
    """The driver's product name."""
    memory_bytes: int
    """Total device memory."""
    reserved_bytes: int = 0
    """Part of memory_bytes that the driver reserves for itself; 0 if unknown."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability, (major, minor); None for other devices."""
    memory_bytes_per_s: float | None = None
    """Peak bandwidth of the device memory."""
    fp32_flops_per_s: float | None = None
    """Peak dense fp32 rate, without tensor cores."""
    tf32_flops_per_s: float | None = None
    """Peak dense tf32 rate of the tensor cores; None without tf32."""
    fp16_flops_per_s: float | None = None
    """Peak dense fp16 rate with fp32 accumulation."""
    bf16_flops_per_s: float | None = None
    """Peak dense bf16 rate with fp32 accumulation; None if bf16 is emulated."""
    peer_bytes_per_s: float | None = None
    """Peak rate from one GPU to the others of its node, one direction, by NVLink or Infinity Fabric if
    present, else PCIe."""
    host_bytes_per_s: float | None = None
    """Peak rate between this GPU and the host, one direction."""
    has_fast_links: bool = False
    """True if NVLink or Infinity Fabric connects all GPUs of a node, so that peers don't use PCIe."""
    context_bytes: int | None = None
    """GPU memory that a training process uses outside PyTorch: CUDA context and loaded kernels. None means
    the table in planning/estimate/device_memory/non_torch_memory.py."""
    context_source: str = ""
    """Source of context_bytes; empty without it."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "context_bytes")
        if (self.context_bytes is None) == bool(self.context_source):
            said = f"{self.context_bytes} with context_source {self.context_source!r}"
            raise ValueError(f"context_bytes: {said}: both stand, or neither")

    @property
    def usable_bytes(self) -> int:
        """Device memory available to processes, which torch reports as total capacity."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def has_bf16(self) -> bool:
        """True if matrix products support bf16: a rate is known, or the GPU is Ampere (8.0) or newer.

        False for a GPU of which only the memory is known.
        Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
        """
        return self.bf16_flops_per_s is not None or (self.compute_capability or (0, 0)) >= (8, 0)


AVAILABLE_SHARE = 0.95
"""Share of the host memory that a run may use on an otherwise idle node.

ASSUMPTION: the kernel, its page tables and the node's services take a few percent.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One node; all nodes of a run are assumed to be alike."""

    gpus: tuple[GpuSpec, ...]
    """The GPUs of one node that a run may use."""
    num_cpu_cores: int
    """Physical cores of one node that this process may use."""
    host_memory_bytes: int
    """Host memory of one node: the smaller of the installed memory and the cgroup's limit."""
    host_memory_available_bytes: int
    """Free host memory of one node, within the cgroup's limit."""
    host_memory_bytes_per_s: float | None = None
    """Bandwidth of one node's host memory; None if neither given nor measured."""
    node_bytes_per_s: float | None = None
    """Rate between nodes, one direction, over all network cards together; None if unknown."""
    nvme_bytes: int = 0
    """Free space on the NVMe disks of one node; 0 if it has none."""
    nvme_read_bytes_per_s: float | None = None
    """Sequential read rate of one node's NVMe disks together."""
    nvme_write_bytes_per_s: float | None = None
    """Sequential write rate of one node's NVMe disks together."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_cpu_cores")
        check_at_least(self, 0, "host_memory_bytes", "host_memory_available_bytes", "nvme_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work of one optimizer step."""

    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks; None: as the script sets it."""
    sequence_length: int | None = None
    """Tokens of the longest sample; None: as the script sets it."""
    target_length: int | None = None
    """Tokens of an encoder-decoder's longest target; None means sequence_length."""
    is_padded: bool = True
    """True if batches carry an attention mask with padding, which rules out flash attention."""
    keeps_outputs: bool = False
    """True if the loop still holds the outputs of one step during the next forward pass, as a plain `outputs
    = model(**batch)` does and Trainer does not."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "global_batch_size", "sequence_length", "target_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions of the installed packages; None if not installed."""

    python: str
    zerofit: str
    torch: str | None = None
    accelerate: str | None = None
    deepspeed: str | None = None
    transformers: str | None = None
    huggingface_hub: str | None = None
    peft: str | None = None
    bitsandbytes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint folder to resume from."""

    folder: str
    """As the user named it."""
    num_ranks: int
    """Ranks that saved optimizer states; 0 if none did, as with ZeRO stage 0."""
    partitions_parameters: bool
    """True if each rank saved its own parameter shard, as with ZeRO-3."""
    is_universal: bool = False
    """True if it was converted by ds_to_universal, so that any number of ranks can load it."""
    tensor_parallel_size: int = 1
    """Ranks over which each layer was sharded."""


def parameters(model: ModelFacts) -> str:
    """Return the number of parameters as text: "8.03 B", "336 M"."""
    number = float(f"{model.num_parameters:.3g}")  # rounded first: 999,885,952 is 1 B
    return f"{number / 1e9:g} B" if number >= 1e9 else f"{number / 1e6:g} M"
