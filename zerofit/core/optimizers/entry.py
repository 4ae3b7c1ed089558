"""OptimizerEntry: all that zerofit knows of one optimizer class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.optimizers.memory import OptimizerMemory
    from zerofit.core.strategy import OptimizerName


class Update(StrEnum):
    """What the update of one element depends on, which decides what ZeRO's flat shards change."""

    ELEMENT = "the element alone"
    WHOLE_TENSOR = "factors or norms of the whole tensor"
    MATRIX = "a matrix: it fails on other shapes"
    BLOCK = "a block of elements that share a scale"
    TWO_WEIGHTS = "two sets of weights, which its train() and eval() exchange"


class Swap(StrEnum):
    """What accelerate's replacement by a CPU optimizer of DeepSpeed does under offload.

    Source: accelerate/utils/deepspeed.py, map_pytorch_optim_to_deepspeed (1.15.0).
    """

    SAME = "CPU Adam computes the same"
    SAME_WITHOUT_DECAY = "CPU Adam computes the same without weight decay"
    """bitsandbytes applies weight decay in Adam as in AdamW, DeepSpeed's CPU Adam as replacement does not."""
    UNBOUNDED = "CPU Adam divides by its eps of 0"
    FAILS_ON_EPS = "CPU Adam can't use its pair of eps"
    FAILS_ON_BETAS = "CPU Adam can't use its three betas"
    FAILS_AS_ADAGRAD = "CPU Adagrad refuses an argument"
    FAILS_AS_LION = "CPU Lion refuses an argument"
    ADAM = "CPU Adam computes the same in fp32, with Adam's weight decay"
    """accelerate passes adamw_mode=False for all but torch's AdamW and bitsandbytes' with 32 bits."""
    OTHER = "CPU Adam computes something else"


class Device(StrEnum):
    """Where the parameters that its kernels step have to be."""

    ANY = "any"
    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The memory of an optimizer with certain options."""

    when: tuple[str, ...]
    """Options that are set to anything but zero, False or None."""
    memory: OptimizerMemory
    unless: tuple[tuple[str, Any], ...] = ()
    """Options with values that exclude it."""

    def holds(self, options: Mapping[str, Any]) -> bool:
        """Return True if a parameter group has these options."""
        is_excluded = any(options.get(name) is value for name, value in self.unless)
        return all(options.get(name) for name in self.when) and not is_excluded


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """How zerofit puts an optimizer in place of a script's own."""

    name: OptimizerName
    label: str
    """In tables: "8-bit AdamW"."""
    module: str
    """Module of the class, and of its equivalents in bitsandbytes."""
    class_name: str
    memory: OptimizerMemory
    """As zerofit makes it."""
    trainer: str
    """TrainingArguments.optim that makes it."""
    trainer_alike: frozenset[str]
    """All names there whose optimizers compute the same, with states no larger on the GPU."""
    keeps: frozenset[str] = frozenset()
    """Options that it copies from an optimizer of the same kind."""
    bits: int | None = None
    """Per state; None for optimizers outside bitsandbytes."""
    is_paged: bool = False
    """True if the driver may page its states to the host."""

    def is_alike(self, optimizer: Any) -> bool:
        """Return True if an optimizer computes the same, with states no larger on the GPU."""
        own = type(optimizer)
        if self.bits is None:
            return (own.__module__, own.__name__) == (self.module, self.class_name)
        return (
            own.__module__ == self.module
            and optimizer.args.optim_bits == self.bits
            and optimizer.is_paged >= self.is_paged
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerEntry:
    """One optimizer class, or one type of DeepSpeed's optimizer section."""

    id: str
    """Library and class: "torch.AdamW". "config." stands for DeepSpeed's optimizer section, "other:" for an
    optimizer of which only the names are known."""
    classes: tuple[str, ...] = ()
    """Dotted names of the class that do not follow from the id by LIBRARIES."""
    trainer: tuple[str, ...] = ()
    """The values of TrainingArguments.optim for which Trainer makes this class
    (transformers/trainer_optimizer.py)."""
    replacement: Replacement | None = None
    """How zerofit puts it in place of a script's own; None if it does not."""
    memory: OptimizerMemory | None = None
    """With the library's default options; None if only a trace of a step knows it."""
    variants: tuple[Variant, ...] = ()
    """Its memory with other options; the first that holds counts."""
    more_states: tuple[str, ...] = ()
    """Options that each add a state as wide as the parameter."""
    is_exact: bool = True
    """False if the memory is a similar optimizer's: a trace of the script's own knows better."""
    update: Update = Update.ELEMENT
    swap: Swap = Swap.OTHER
    device: Device = Device.ANY
    is_tested: bool = False
    """True if DeepSpeed accepts it with ZeRO by default (deepspeed/runtime/zero/utils.py)."""
    is_rebuilt: bool = False
    """True if ZeRO makes another from the class's defaults (deepspeed/runtime/zero/stage_1_and_2.py)."""
    needs_closure: bool = False
    is_converted: bool = False
    """True if DeepSpeed's ds_to_universal converts its states (deepspeed 0.19.8,
    checkpoint/ds_to_universal.py)."""
    same_as: str = ""
    """Of a type of DeepSpeed's file: the id of the class that computes the same."""
    ignores_case: bool = False
    """True for a type that DeepSpeed's file may spell in any case (deepspeed/runtime/config.py,
    DEEPSPEED_OPTIMIZERS)."""
    until: str = ""
    """Of a type that DeepSpeed has removed: the first release without it."""
    package: str = ""
    """The package that makes it, if `make evidence` runs without it: under DeepSpeed it was not measured."""
    fails_on_dtensors: bool = False
    """True if its step fails on sharded parameters of FSDP2 (torch 2.13), as those of bitsandbytes do."""
    is_too_slow: bool = False
    """True if its first step on CPU ranks takes longer than the harness of `make evidence` waits."""

    @property
    def takes_dtensors(self) -> bool:
        """True if it steps the sharded parameters of FSDP2, as far as known."""
        return not (self.fails_on_dtensors or self.library == "bitsandbytes")

    @property
    def library(self) -> str:
        """The part of the id before the class."""
        return self.id.partition(".")[0].partition(":")[0]

    @property
    def not_run(self) -> str:
        """What a measurement needs that the tests' CPU ranks don't have; empty for nothing."""
        if self.package:
            return f"the package {self.package}"
        return "a GPU" if self.is_too_slow else ""

    @property
    def class_name(self) -> str:
        """The last part of the id."""
        return self.id.rpartition(".")[2]

    def memory_with(self, options: Mapping[str, Any]) -> OptimizerMemory | None:
        """Return its memory with the options of a parameter group; None if only a trace knows it."""
        found = next((variant.memory for variant in self.variants if variant.holds(options)), self.memory)
        more = [name for name in self.more_states if options.get(name)]
        if found is None or not more:
            return found
        return replace(
            found,
            formula=found.formula + "".join(f" + b P of {name}" for name in more),
            like_parameter=found.like_parameter + len(more),
            least_bytes=found.least_bytes + 4 * len(more),
            step_bytes=found.step_bytes + 12 * len(more),
            step_bytes_16bit=found.step_bytes_16bit + 6 * len(more),
        )
