"""Overrides: the settings that the user gave, each with its place; defaults are not among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zerofit.core.setting import Said
from zerofit.core.strategy import Engine, Lora, Quantization

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    "activation_offload": "--offload-activations",
    "optimizer": "--optimizer",
    "attention": "--attention",
    "compile": "--compile",
    "freeze": "--freeze",
    "lora": "--lora",
    "quantization": "--qlora",
    "tf32": "--tf32",
    "liger": "--liger",
    "group_by_length": "--group-by-length",
    "reshard_after_forward": "--reshard-after-forward",
    "state_dict_type": "--state-dict-type",
}
"""The command-line flag of each Strategy field that has one."""
IMPLY_CHECKPOINTING = {
    "checkpoint_every": "selects the blocks that recompute their activations",
    "activation_offload": "stores the inputs of blocks that recompute their activations",
}
"""Fields that imply gradient checkpointing, and what they do."""
SWITCHED = (bool, Lora, Quantization)
"""Kinds of fields whose flag takes no value."""
OTHER_FLAGS = {
    "global_batch_size": "--global-batch-size",
    "world_size": "--num-processes",
    "num_nodes": "--num-machines",
    "tensor_parallel_size": "--tensor-parallel-size",
    "sequence_parallel_size": "--sequence-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "pipeline_stages_per_rank": "--pipeline-stages-per-rank",
    "dp_replicate_size": "--dp-replicate-size",
}
"""The flag of each other field: those of Topology, and the global batch of Workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedFlag:
    """A flag that zerofit no longer has."""

    replacement: str
    """The flag that does the same."""
    fix: str
    """How to write that."""


REMOVED_FLAGS = {
    "--fastest": RemovedFlag(replacement="--prefer-speed", fix="write --prefer-speed, which does the same"),
    "--quantize": RemovedFlag(
        replacement="--qlora", fix="write --qlora in place of --lora --quantize nf4: it trains the same"
    ),
    "--fix": RemovedFlag(
        replacement="--zero-stage",
        fix="write the strategy's own flag, such as --zero-stage 3 in place of --fix zero-stage=3",
    ),
    "--nodes": RemovedFlag(replacement="--num-machines", fix="write --num-machines, which does the same"),
    "--compare": RemovedFlag(
        replacement="--gpus", fix="repeat --gpus for each machine: --gpus 8xA100-80G --gpus 1xRTX4090"
    ),
}
"""By name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the user set, by field of Strategy, Topology and Workload."""

    said: Mapping[str, Said[Any]] = field(default_factory=dict)
    beaten: Mapping[str, Said[Any]] = field(default_factory=dict)
    """The settings that others override, by field: a file's, where a flag says something else."""

    def get(self, name: str) -> Any:
        """Return the value of a field; None if it is not set."""
        found = self.said.get(name)
        return None if found is None else found.value

    def has(self, name: str) -> bool:
        """Return True if a field is set."""
        return name in self.said

    def where(self, name: str) -> str:
        """Return where a field is set: "--zero-stage", "acc.yaml:7"."""
        return self.said[name].where

    def is_in_file(self, name: str) -> bool:
        """Return True if a configuration file sets a field."""
        return name in self.said and self.said[name].place is not None

    @property
    def strategy(self) -> dict[str, Any]:
        """The values of the fields of Strategy."""
        return {name: self.said[name].value for name in FLAGS if name in self.said}

    def without(self, names: Iterable[str]) -> Overrides:
        """Return the overrides without some fields."""
        left_out = set(names)
        return replace(self, said={name: said for name, said in self.said.items() if name not in left_out})

    def only(self, names: Iterable[str]) -> Overrides:
        """Return the overrides of some fields."""
        return replace(self, said={name: self.said[name] for name in names if name in self.said})

    def over(self, other: Overrides) -> Overrides:
        """Return both, where this one takes precedence; a differing value of the other is kept as beaten."""
        beaten = {
            name: said
            for name, said in other.said.items()
            if name in self.said and self.said[name].value != said.value
        }
        return Overrides(said={**other.said, **self.said}, beaten={**other.beaten, **beaten, **self.beaten})

    def setting(self, where: str = "", **values: Any) -> Overrides:
        """Return the overrides with other values; None removes a field.

        Args:
            where: where they come from, for reasons; by default their flags.
            values: by field.
        """
        said = {name: setting for name, setting in self.said.items() if name not in values}
        return replace(self, said={**said, **overrides(where, **values).said})


NOTHING_SAID = Overrides()
"""Of a user who set nothing."""


def overrides(where: str = "", **values: Any) -> Overrides:
    """Return values as overrides, without those that are None.

    Args:
        where: where they come from, for reasons; by default their flags.
        values: by field.
    """
    return Overrides(
        said={
            name: value if isinstance(value, Said) else Said(value=value, text=where or flag_of(name, value))
            for name, value in values.items()
            if value is not None
        }
    )


OF_FSDP2 = ("reshard_after_forward", "state_dict_type", "dp_replicate_size")
"""Fields that only FSDP2 has."""


def with_engine_of(said: Overrides) -> Overrides:
    """Return overrides with FSDP2 as engine if none is set and a field that only FSDP2 has is."""
    named = next((said.said[name] for name in OF_FSDP2 if said.has(name)), None)
    if said.has("engine") or named is None:
        return said
    return replace(said, said={**said.said, "engine": replace(named, value=Engine.FSDP2)})


def flag_of(name: str, value: Any = None) -> str:
    """Return the flag of a field: "--zero-stage", for a value of False "--no-tf32"."""
    flag = FLAGS.get(name) or OTHER_FLAGS.get(name) or f"--{name.replace('_', '-')}"
    return flag.replace("--", "--no-", 1) if value is False else flag
