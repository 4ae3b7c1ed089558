"""Row of the optimizer table: what some optimizers do in some placements, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zerofit.core.command import Route
from zerofit.core.strategy import ZeroStage


class Answer(StrEnum):
    """What a combination comes to."""

    ALLOWED = "allowed"
    """It trains what it trains unsharded."""
    DIFFERENT = "allowed, but numerically different"
    """The optimizer that was asked for runs, and shards change what it computes."""
    WRONG = "silently wrong"
    """Another optimizer runs, and nothing says so."""
    REFUSED = "refused"
    """The run ends in an error."""
    UNKNOWN = "not known"
    """Nobody measured it, and nothing in the libraries decides it."""


class Cause(StrEnum):
    """Why a combination comes to its answer, in a few words."""

    ELEMENTWISE = "it steps each element by itself, so that shards change nothing"
    NOT_SHARDED = "nothing is partitioned"
    SAME_ON_CPU = "DeepSpeed's CPU Adam takes its place and computes the same"
    SAME_WITHOUT_DECAY = "DeepSpeed's CPU Adam takes its place and, without weight decay, computes the same"
    SWAPPED = "accelerate puts DeepSpeed's CPU Adam in its place"
    SWAP_KEEPS_GROUPS = "accelerate gives its parameter groups to DeepSpeed's CPU Adam, which can't read them"
    SWAP_ARGUMENT = "accelerate gives adamw_mode to DeepSpeed's CPU Adagrad or Lion, which do not know it"
    REFUSED_CLIENT = (
        "under offload DeepSpeed takes no optimizer of the script's but its own CPU Adam and Lion"
    )
    UNTESTED = "DeepSpeed has not tested it with ZeRO and asks for zero_allow_untested_optimizer"
    WHOLE_TENSORS = "it steps by factors or norms of whole tensors, and ZeRO gives it flat shards"
    NEEDS_MATRICES = "it takes matrices only, and ZeRO gives it flat shards"
    REBUILT = "ZeRO makes a new Adagrad from its defaults, without its groups' settings and its scheduler"
    GATHERED = "DeepSpeed gathers each matrix for its step"
    REDUCE_SCATTER = "at stage 3 DeepSpeed's Muon needs zero_optimization.reduce_scatter to be false"
    BLOCKS = "flat shards cut its 8-bit blocks elsewhere"
    BF16_STEPS = "it orthogonalises in bf16, where the order of sums shows"
    DECOUPLED = "DeepSpeed makes of Adam an AdamW unless adam_w_mode is false"
    NO_SUCH_TYPE = "neither DeepSpeed nor torch.optim has an optimizer of this name"
    NO_SECTION = "it stands for an optimizer section that is not there"
    NOT_AN_OPTIMIZER = "it is accelerate's placeholder, and DeepSpeed takes a real optimizer only"
    ON_GPU = "it steps on the CPU, and without offload its parameters are on the GPU"
    ON_CPU = "it steps on the GPU, and offload keeps its parameters on the CPU"
    GPU_KERNEL = "its kernel is for GPUs"
    NEEDS_CLOSURE = "its step() needs a closure, which DeepSpeed's engine does not pass on"
    NEEDS_MUP = "the package mup makes it"
    NOT_MEASURED = "nobody measured it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What some optimizers do in some placements. None, or all stages and routes, stand for "whichever"."""

    optimizers: tuple[str, ...]
    """Ids; "torch.*" stands for all that begin so, "*" for all."""
    but_not: tuple[str, ...] = ()
    """Ids that these patterns cover and the row does not."""
    answer: Answer
    cause: Cause
    stages: tuple[ZeroStage, ...] = tuple(ZeroStage)
    routes: tuple[Route, ...] = tuple(Route)
    offloads_optimizer: bool | None = None
    forces_cpu_optimizer: bool | None = None
    allows_untested: bool | None = None
    error: tuple[float, float] | None = None
    """Smallest and largest relative error of the weights that was measured, where it is above 1e-4; 1e6
    stands for weights that are not finite any more."""
    says: str = ""
    """Part of the error's text, where it is refused."""
    not_run: str = ""
    """What a measurement would need, where a CPU can't make one; the libraries' source is the evidence."""
