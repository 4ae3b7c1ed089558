"""Request: the user's settings from flags, presets, plan files; None if not set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.plan import Plan
    from zerofit.core.strategy import (
        Engine,
        Lora,
        OffloadDevice,
        OptimizerName,
        Precision,
        Quantization,
        ZeroStage,
    )

FLAGS = {
    "engine": "--engine",
    "zero_stage": "--zero-stage",
    "optimizer_offload": "--offload-optimizer",
    "param_offload": "--offload-param",
    "nvme_path": "--nvme-path",
    "precision": "--mixed-precision",
    "micro_batch_size": "--micro-batch-size",
    "gradient_accumulation_steps": "--gradient-accumulation-steps",
    "gradient_clipping": "--gradient-clipping",
    "gradient_checkpointing": "--gradient-checkpointing",
    "checkpoint_every": "--checkpoint-every",
    "optimizer": "--optimizer",
    "attention": "--attention",
    "compile": "--compile",
    "freeze": "--freeze",
    "lora": "--lora",
    "quantization": "--quantize",
    "tf32": "--tf32",
    "liger": "--liger",
    "group_by_length": "--group-by-length",
}
"""The command-line flag of each Strategy field that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The user's settings; those that are Strategy fields too override them there."""

    preset: str | None = None
    """Name of a preset to start from."""
    plan: Plan | None = None
    """A plan to start from, read from a file."""
    engine: Engine | None = None
    zero_stage: ZeroStage | None = None
    optimizer_offload: OffloadDevice | None = None
    param_offload: OffloadDevice | None = None
    nvme_path: str | None = None
    precision: Precision | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    gradient_checkpointing: bool | None = None
    checkpoint_every: int | None = None
    optimizer: OptimizerName | None = None
    attention: str | None = None
    compile: bool | None = None
    freeze: tuple[str, ...] | None = None
    lora: Lora | None = None
    quantization: Quantization | None = None
    tf32: bool | None = None
    liger: bool | None = None
    group_by_length: bool | None = None
    says_qlora: bool = field(default=False, compare=False)
    """True if adapters and quantization were requested as --qlora."""
    typed: tuple[tuple[str, ...], tuple[str, ...]] = field(default=((), ()), compare=False, repr=False)
    """The command line up to the script, and from it on; empty if there was none."""
    said_by: Mapping[str, str] = field(default_factory=dict, compare=False)
    """File and line of each field that a configuration file sets and no flag does."""
    allowed_lora: Lora | None = None
    """Adapters to use if the user allows them without asking for them."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks."""
    num_processes: int | None = None
    """Ranks on all nodes together."""
    num_nodes: int | None = None
    """Number of nodes."""
    tensor_parallel_size: int | None = None
    """Ranks that share each matrix product of one copy of the model."""
    sequence_parallel_size: int | None = None
    """Ranks that share the tokens of the same samples."""
    pipeline_parallel_size: int | None = None
    """Ranks that each hold stages of a copy of the model."""
    pipeline_stages_per_rank: int | None = None
    """Stages that each of them holds."""
    on_cpu: bool = False
    """True to ignore GPUs."""
    elsewhere: bool = False
    """True if the plan is for another machine, whose GPUs can't be verified."""

    @property
    def ranks_said(self) -> str:
        """The number of ranks, as the flag for it unless others were typed."""
        own = [word.partition("=")[0].replace("_", "-") for word in self.typed[0]]
        is_typed = not own or "--num-processes" in own
        return f"--num-processes {self.num_processes}" if is_typed else f"{self.num_processes} ranks"
