"""What is known before a plan is made: the model, the machine, the workload, the versions."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.strict import STRICT, check_at_least


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

    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU as the driver reports it."""

    name: str
    """The driver's product name."""
    memory_bytes: int
    """Total device memory."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability, (major, minor); None where it is no CUDA device."""

    __pydantic_config__ = STRICT

    @property
    def has_bf16(self) -> bool:
        """Whether the tensor cores take bf16: compute capability 8.0 (Ampere) or later.

        Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
        """
        return self.compute_capability is not None and self.compute_capability >= (8, 0)


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

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_cpu_cores")
        check_at_least(self, 0, "host_memory_bytes", "host_memory_available_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one optimizer step has to process."""

    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks; None leaves it to the script."""
    sequence_length: int | None = None
    """Tokens of the longest sample; None leaves it to the script."""

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_at_least(self, 1, "global_batch_size", "sequence_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions of what a run is made of, as the installed packages state them; None where not installed."""

    python: str
    zerofit: str
    torch: str | None = None
    accelerate: str | None = None
    deepspeed: str | None = None
    transformers: str | None = None
    peft: str | None = None
    bitsandbytes: str | None = None

    __pydantic_config__ = STRICT
