"""Facts known before a plan is made: the model, the machine, the workload, the versions."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.core.validation import check_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The dimensions of a model, as its config.json names them."""

    name: str
    """The hub id, folder or catalog name the facts were taken from."""
    model_type: str
    """transformers' architecture family, such as "llama"."""
    num_parameters: int
    """All parameters, each tied one counted once."""
    num_trainable_parameters: int
    """The parameters that get gradients."""
    num_layers: int
    """Transformer blocks; encoder and decoder together."""
    hidden_size: int
    """Width of the residual stream."""
    vocab_size: int
    """Rows of the token embedding; 0 for a model without tokens."""
    max_sequence_length: int | None = None
    """Positions the model was made for; None where it has no limit."""
    architecture: str = ""
    """transformers' class with its task head, such as "LlamaForCausalLM"; empty where it is not known."""
    intermediate_size: int = 0
    """Width inside one feed-forward block (of one expert, in a mixture); 0 where it is not known."""
    num_attention_heads: int = 0
    """Query heads of one layer; 0 where it is not known."""
    num_key_value_heads: int = 0
    """Key and value heads of one layer; fewer than the query heads where they share."""
    head_dim: int = 0
    """Width of one head; 0 where it is not known."""
    num_decoder_layers: int = 0
    """Of num_layers, those of a decoder that attends to an encoder; 0 without one."""
    num_experts: int = 0
    """Experts of one mixture layer; 0 for a dense model."""
    num_experts_per_token: int = 0
    """Experts that each token goes through."""
    is_gated: bool = False
    """True if the feed-forward block has a gate: three matrices rather than two."""
    is_causal: bool = False
    """True if its head predicts the next token, by a decoder without an encoder."""
    num_largest_layer_parameters: int = 0
    """Parameters of the largest transformer block; 0 where it is not known."""
    largest_parameter: int = 0
    """Elements of the largest single parameter: the token embedding, or all experts of a layer where
    transformers keeps them in one; 0 where it is not known."""
    checkpoint_dtype: str = ""
    """Data type of the published weights as config.json says it, or the weights beside it: "bfloat16", say.
    transformers loads a model in it unless told otherwise; empty where nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU as the driver reports it."""

    name: str
    """The driver's product name."""
    memory_bytes: int
    """Total device memory."""
    reserved_bytes: int = 0
    """Of memory_bytes, what the driver keeps back and no process gets; 0 where it is not known."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability, (major, minor); None where it is no CUDA device."""
    memory_bytes_per_s: float | None = None
    """Peak bandwidth of the device memory."""
    fp32_flops_per_s: float | None = None
    """Peak dense fp32 rate, without tensor cores."""
    tf32_flops_per_s: float | None = None
    """Peak dense tf32 rate of the tensor cores; None where there is no tf32."""
    fp16_flops_per_s: float | None = None
    """Peak dense fp16 rate with fp32 accumulation."""
    bf16_flops_per_s: float | None = None
    """Peak dense bf16 rate with fp32 accumulation; None where bf16 is emulated."""
    peer_bytes_per_s: float | None = None
    """Peak rate from one GPU to the others of its node, one direction: NVLink, Infinity Fabric, else PCIe."""
    host_bytes_per_s: float | None = None
    """Peak rate between this GPU and the host, one direction."""
    has_fast_links: bool = False
    """True if NVLink or Infinity Fabric joins all GPUs of its node, so that peers do not meet over PCIe."""
    context_bytes: int | None = None
    """Memory of this GPU that a training process holds beside torch's: CUDA context and loaded kernels.
    None takes the table of estimate/outside.py."""
    context_source: str = ""
    """Where context_bytes is from; empty without it."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "context_bytes")
        if (self.context_bytes is None) == bool(self.context_source):
            said = f"{self.context_bytes} with context_source {self.context_source!r}"
            raise ValueError(f"context_bytes: {said}: both stand, or neither")

    @property
    def usable_bytes(self) -> int:
        """The device memory that processes may take together, what torch calls the total capacity."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def has_bf16(self) -> bool:
        """True if matrix products take bf16: a rate is known, or it is Ampere (8.0) or later.

        A GPU of which only the memory is known has none, as far as one can tell.
        Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
        """
        return self.bf16_flops_per_s is not None or (self.compute_capability or (0, 0)) >= (8, 0)


AVAILABLE_SHARE = 0.95
"""Of the host memory, what a run may take on a node that does nothing else.

ASSUMPTION: the kernel, its page tables and the services of a node take some percent.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One node: all nodes of a run are taken to be alike."""

    gpus: tuple[GpuSpec, ...]
    """The GPUs of one node that a run may use."""
    num_cpu_cores: int
    """Physical cores that this process may use, on one node."""
    host_memory_bytes: int
    """Host memory of one node: the smaller of what is installed and the cgroup's limit."""
    host_memory_available_bytes: int
    """Host memory of one node that is free to be taken now, within the cgroup's limit."""
    host_memory_bytes_per_s: float | None = None
    """Bandwidth of one node's host memory; None where it was neither said nor measured."""
    node_bytes_per_s: float | None = None
    """Rate from one node to the others, one direction, all network cards together; None where not known."""
    nvme_bytes: int = 0
    """Free space on the NVMe disks of one node; 0 without any."""
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
    """Samples per optimizer step over all ranks; None leaves it to the script."""
    sequence_length: int | None = None
    """Tokens of the longest sample; None leaves it to the script."""
    target_length: int | None = None
    """Tokens of the longest target of an encoder-decoder; None takes sequence_length."""
    is_padded: bool = True
    """True if batches carry an attention mask with padding in it, which keeps flash attention away."""
    keeps_outputs: bool = False
    """True if the loop still holds the outputs of one step while the next runs forward, as a plain
    `outputs = model(**batch)` does and Trainer does not."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "global_batch_size", "sequence_length", "target_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions of what a run is made of, as the installed packages state them; None where not installed."""

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
    """One folder that a run can resume from."""

    folder: str
    """As the user named it."""
    num_ranks: int
    """Ranks that saved optimizer states; 0 where there are none, as at ZeRO stage 0."""
    partitions_parameters: bool
    """True if each rank saved its own shard of the parameters, as at ZeRO-3."""
    is_universal: bool = False
    """True if ds_to_universal made it, so that it loads on any number of ranks."""
    tensor_parallel_size: int = 1
    """Ranks over which each layer was cut."""


def parameters(model: ModelFacts) -> str:
    """Return the number of parameters: "8.03 B", "336 M"."""
    number = model.num_parameters
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"
