"""Situation: the input of all rules; and UnknownFact, by which a rule reports an unknown fact."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from zerofit.configs.document import NO_DOCUMENT
from zerofit.configs.schema import walk_document
from zerofit.core.command import Route
from zerofit.core.overrides import FLAGS
from zerofit.core.setting import Confidence, Said

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.inputs.hostfiles import Hostfile
    from zerofit.checking.inputs.shell_lines import ShellLine
    from zerofit.checking.inputs.shell_words import LineBreak
    from zerofit.configs.document import BrokenFile, Document
    from zerofit.configs.schema import FoundKey, Schemas
    from zerofit.core.capture import Capture
    from zerofit.core.command import LaunchCommand, Launcher
    from zerofit.core.errors import UserError
    from zerofit.core.facts import Checkpoint, Machine, Versions
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage
    from zerofit.scripts.facts import ScriptFacts
    from zerofit.scripts.flag_names import FlagNames

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "bf16": False,
    "fp16": False,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "auto_find_batch_size": False,
    "save_strategy": "steps",
    "eval_strategy": "no",
    "save_steps": 500,
    "eval_steps": None,
    "logging_steps": 500,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "lr_scheduler_type": "linear",
}
"""Defaults of the fields that rules compare (transformers/training_args.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The known TrainingArguments."""

    said: Mapping[str, Said[Any]] = field(default_factory=dict)
    """Each given field; for a command line, also arguments that other classes may use."""
    unread: frozenset[str] = frozenset()
    """Fields that the script sets to values only known at run time."""
    is_complete: bool = False
    """True if all arguments and keywords are known, so that missing fields have their defaults."""
    confidence: Confidence = Confidence.LIKELY
    """Of the defaults: CERTAIN if each run certainly makes these TrainingArguments."""
    fsdp_config: Mapping[str, Said[Any]] | None = None
    """The known keys of its dictionary fsdp_config; None if it is none, or not given."""
    axolotl_fsdp: Mapping[str, Said[Any]] | None = None
    """The keys of fsdp_config in a recipe of Axolotl, which has a version beside it and names of its own."""
    surplus: tuple[Said[str], ...] = ()
    """Unknown keywords of TrainingArguments(...); the values are the names."""

    def find(self, name: str) -> Said[Any] | None:
        """Return a given field."""
        return self.said.get(name)

    def find_or_default(self, name: str) -> Said[Any] | None:
        """Return a field, given or by default; None if unknown."""
        if name in self.said:
            return self.said[name]
        if name in self.unread or not self.is_complete or name not in DEFAULTS:
            return None
        value = DEFAULTS[name]
        return Said(value=value, text=f"no {name}, so it is {value}", confidence=self.confidence)


T = TypeVar("T")


class UnknownFact(Exception):  # noqa: N818 - not an error: the rule's answer is unknown
    """Raised by a predicate that needs an unknown fact; the rule's answer is then "unknown".

    Args:
        fact: the unknown fact, as printed after "not checked, because unknown:".
    """

    def __init__(self, fact: str) -> None:
        super().__init__(fact)
        self.fact = fact


def known(value: T | None, fact: str) -> T:
    """Return a fact.

    Raises:
        UnknownFact: it is unknown.
    """
    if value is None:
        raise UnknownFact(fact)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The effective settings of a run, over all layers. None means unknown; query with `known`.

    A setting that no layer sets has its default, with a text that names what is missing.
    """

    names: dict[str, str] = field(default_factory=dict)
    """The user's spelling of each setting, for fixes: {"zero_stage": "--zero-stage", ...}."""
    engine: Said[Engine] | None = None
    zero_stage: Said[ZeroStage] | None = None
    optimizer_offload: Said[OffloadDevice] | None = None
    param_offload: Said[OffloadDevice] | None = None
    optimizer_nvme_path: Said[str | None] | None = None
    """Folder on the NVMe disk for the optimizer's states; a value of None: none is named."""
    param_nvme_path: Said[str | None] | None = None
    precision: Said[Precision | None] | None = None
    """A value of None: no layer sets it."""
    optimizer: Said[str | None] | None = None
    """Id of the optimizer in the optimizer table; a value of None: there is none, nothing trains."""
    force_cpu_optimizer: Said[bool] | None = None
    """DeepSpeed's zero_force_ds_cpu_optimizer."""
    fields: Mapping[str, Said[Any]] = field(default_factory=dict)
    """Each field of zerofit's Strategy that the user set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """Numbers of ranks that the user asks for, before it is known whether they make a Topology."""

    world_size: int
    text: str
    """The flag or setting that gives them, as the user wrote it."""
    num_nodes: int = 1
    gpus_per_node: int | None = None
    """None if the ranks need no GPUs, or those of the machine are unknown."""
    can_rehearse: bool = True
    """False for the GPUs of another machine, given by --gpus."""
    group_sizes: Mapping[str, int] = field(default_factory=dict)
    """Ranks per group by the kind of parallelism: "tensor", "sequence", "pipeline"."""
    stages_per_rank: int = 1
    """Stages of a pipeline that each rank holds."""
    dp_replicate_size: int = 1
    """Copies of the weights that FSDP2 shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The facts that rules check. None means absent."""

    settings: RunSettings = field(default_factory=RunSettings)
    strategy: Strategy | None = None
    """zerofit's own, with the changes that it makes to the model; None if the run is defined by files."""
    typed: Collection[str] | None = None
    """Fields of the strategy that the user set by flags; None: all of them."""
    route: Route | None = None
    launcher: Launcher | None = None
    deepspeed: Document | None = None
    """The DeepSpeed configuration."""
    accelerate: Document | None = None
    """The file of `accelerate config`."""
    command: LaunchCommand | None = None
    """The launcher's command line."""
    script: ScriptFacts | None = None
    """Facts from the script's source."""
    script_names: FlagNames | None = None
    """Names that may be flags of the line's script; None if it can't be read."""
    trainer: TrainerSettings | None = None
    """TrainingArguments, from the script's arguments and source; None without a Trainer."""
    checkpoint: Checkpoint | None = None
    """The checkpoint to resume from."""
    capture: Capture | None = None
    """What the script builds, observed where its training would begin; None if it was not run."""
    schemas: Schemas | None = None
    missing: tuple[Said[str], ...] = ()
    """Named files that do not exist: the path, and the line or flag that names it."""
    missing_script: UserError | None = None
    """The error of a launcher whose script does not exist."""
    hostfile: Hostfile | None = None
    """The nodes that DeepSpeed's launcher is told of."""
    missing_hostfile: str | None = None
    """The flag that names a hostfile that does not exist."""
    broken: tuple[BrokenFile, ...] = ()
    """Files that could not be parsed as their kind."""
    breaks: tuple[LineBreak, ...] = ()
    """Where the launch line of a shell script loses its next lines."""
    line: ShellLine | None = None
    """The line of a shell script that starts the run; None if the user typed it."""
    is_imported: bool = False
    """True for files that zerofit reads itself, so that only what makes them unreadable counts."""
    ranks: RankCounts | None = None
    """Ranks that zerofit's flags ask for; None once they make a topology."""
    topology: Topology | None = None
    machine: Machine | None = None
    versions: Versions | None = None

    @property
    def file(self) -> Document:
        """The DeepSpeed configuration; an empty one if there is none."""
        return self.deepspeed or NO_DOCUMENT

    @property
    def arguments(self) -> TrainerSettings:
        """TrainingArguments; without known fields if there is no Trainer."""
        return self.trainer or TrainerSettings()

    @property
    def is_from_flags(self) -> bool:
        """True if only zerofit's own flags define the run, and no files."""
        return self.deepspeed is None and self.accelerate is None and self.command is None


def setting_text(strategy: Strategy, name: str, *, is_typed: bool) -> str:
    """Return how a finding names a strategy's field: by the flag that the user typed, else in words."""
    value = getattr(strategy, name)
    if value is None or value == "none":
        return f"no {FLAGS[name]}"
    if not is_typed:
        return _SETTING_WORDS[name].format(value.value if isinstance(value, IntEnum) else value)
    if name in ("lora", "quantization"):
        return FLAGS[name]
    shown = value.replace("_", "-") if name == "attention" else value
    return f"{FLAGS[name]} {shown.value if isinstance(shown, IntEnum) else shown}"


_SETTING_WORDS = {
    "engine": "the {} engine",
    "zero_stage": "ZeRO stage {}",
    "optimizer": "{}",
    "optimizer_offload": "optimizer offload to {}",
    "param_offload": "parameter offload to {}",
    "nvme_path": "the folder {}",
    "precision": "{}",
    "attention": "{} attention",
    "lora": "LoRA adapters",
    "quantization": "{} weights",
}
"""Settings that the planner or a preset may choose, without flags."""


def text_of(situation: Situation, name: str) -> str:
    """Return how a finding names a field of the situation's strategy."""
    strategy = known(situation.strategy, "zerofit's strategy")
    is_typed = situation.typed is None or name in situation.typed
    return setting_text(strategy, name, is_typed=is_typed)


def stage_of(situation: Situation) -> Said[ZeroStage]:
    """Return the ZeRO stage.

    Raises:
        UnknownFact: it is unknown.
    """
    return known(situation.settings.zero_stage, "the ZeRO stage")


def is_read_by_others(situation: Situation) -> bool:
    """Return True if accelerate or Trainer read the DeepSpeed file, False if only DeepSpeed does.

    Raises:
        UnknownFact: the route is unknown.
    """
    return known(situation.route, "the library that reads it") is not Route.NATIVE


def entries_of(situation: Situation) -> Iterator[tuple[Document, FoundKey]]:
    """Yield the DeepSpeed file and each of its entries with its key in the schema; nothing without a file."""
    if situation.deepspeed is not None:
        schema = known(situation.schemas, "DeepSpeed's keys").deepspeed
        for found in walk_document(situation.deepspeed, schema):
            yield situation.deepspeed, found
