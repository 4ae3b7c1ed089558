"""Settings of accelerate's and DeepSpeed's configuration files, each with its line."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.engine import check
from zerofit.checking.inputs.accelerate import (
    DEEPSPEED_SECTION,
    IN_DEEPSPEED_FILE,
    OTHER_PARADIGMS,
    LaunchLayers,
    finite_number,
    ineffective_flags,
    whole_number,
)
from zerofit.checking.inputs.fsdp import read_fsdp
from zerofit.checking.inputs.fsdp_words import words_of_accelerate
from zerofit.checking.inputs.situations import situations
from zerofit.checking.inputs.zerofit_line import PLANNED_FIELDS
from zerofit.checking.read_targets import read_targets
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ON_READING
from zerofit.checking.script_files import inline_json
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.core.overrides import OF_FSDP2, Overrides, with_engine_of
from zerofit.core.setting import Place, Said
from zerofit.core.strategy import Buckets, Engine, OffloadDevice, Precision
from zerofit.machine.versions import probe_versions
from zerofit.planning.sources.engine_change import changed_engine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.checking.situation import RunSettings, Situation
    from zerofit.configs.document import Document
    from zerofit.core.command import Flag, LaunchCommand
    from zerofit.planning.sources.nodes import Nodes

_KEPT_OF_FSDP2 = ("engine", "state_dict_type", "dp_replicate_size")
"""What a plan keeps of a file for FSDP: the engine, its checkpoints and its copies of the weights."""
_PARADIGMS = ("cpu", "use_deepspeed", *OTHER_PARADIGMS)
"""Flags of `accelerate launch` that decide which engine runs."""
_NODE_KEYS = {
    "num_processes": "num_processes",
    "machine_rank": "machine_rank",
    "main_process_port": "main_process_port",
    "num_nodes": "num_machines",
    "main_process_ip": "main_process_ip",
    "gpu_ids": "gpu_ids",
}
"""The key in accelerate's file of each field of Nodes."""
_KNOWN_KEYS = """
    zero_optimization bf16 fp16 gradient_clipping gradient_accumulation_steps train_batch_size
    train_micro_batch_size_per_gpu steps_per_print wall_clock_breakdown zero_force_ds_cpu_optimizer
    zero_allow_untested_optimizer tensor_parallel
    """
"""Keys of a DeepSpeed file that are imported, or that zerofit's own file has."""
_KNOWN_ZERO_KEYS = "stage offload_optimizer offload_param contiguous_gradients"
"""Keys of its section zero_optimization, likewise."""
_SCRIPT_FIELDS = {
    "gradient_clipping": "gradient_clipping",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
}
"""Keys whose "auto" accelerate or Trainer replaces by the script's value, and their fields of Strategy."""
_BATCH_KEYS = {"train_micro_batch_size_per_gpu": "micro_batch_size", "train_batch_size": "global_batch_size"}
"""Keys with numbers of samples, and their fields."""
_PRECISION_DEFAULTS = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "min_loss_scale": 1,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "auto_cast": False,
    "bf16_optimizer_states": False,
    "fp16_master_weights_and_grads": False,
    "bf16_master_weights_and_grads": False,
}
"""DeepSpeed's defaults of keys in fp16 and bf16 (runtime/precision_config.py)."""
_NO_PRECISION = ("enabled", "check_grad_overflow", "immediate_grad_update")
"""Keys there that are imported, or that change no result."""
_TENSOR_PARALLEL_KEY = ("tensor_parallel", "autotp_size")
_PARALLELISM = "parallelism_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFiles:
    """The settings in a launch line's configuration files."""

    name: str
    """The first of the files."""
    overrides: Overrides
    """Strategy, precision, accumulation, clipping and groups of ranks."""
    buckets: Mapping[str, int | str]
    """Sizes of ZeRO's buckets in elements, or "auto", by field of Buckets."""
    nodes: Mapping[str, Said[Any]]
    """Values by field of Nodes."""
    on_cpu: bool
    """True if the ranks run on the CPU."""
    engine: str
    """The engine that would run the script with these files without zerofit; empty for plain DDP."""
    left_out: tuple[str, ...]
    """Keys of a DeepSpeed file that are not imported."""
    by_script: tuple[str, ...]
    """Fields of Strategy that a DeepSpeed file leaves to the script, by "auto"."""
    batch: Mapping[str, Said[int]]
    """The numbers of its batch keys: micro_batch_size and global_batch_size. A run has the script's."""
    notes: tuple[str, ...] = ()
    """What was translated for another engine or version, and what was left out; one sentence each."""
    ignored: tuple[Flag, ...] = ()
    """Flags of the line of `accelerate launch` with these files in whose place the files decide."""

    def with_batch(self) -> ConfigFiles:
        """Return the files with the batch that they name among their settings, for files made from them.

        If they name all three numbers, the global batch is left out: it follows from the others.
        """
        parts = {"micro_batch_size", "gradient_accumulation_steps"}
        names = {*self.batch, *self.overrides.said}
        said = {name: size for name, size in self.batch.items() if name in parts or not parts <= names}
        return replace(self, overrides=Overrides(said=said).over(self.overrides))

    @property
    def line(self) -> str:
        """A sentence on the imported settings."""
        said = {
            **{name: said.value for name, said in self.nodes.items() if name == "num_processes"},
            **{name: said.value for name, said in self.overrides.said.items()},
        }
        words = ", ".join(f"{name} {getattr(value, 'value', value)}" for name, value in said.items())
        unused = [key for key in self.left_out if not _only_runs(key)]
        rest = f"; not used: {', '.join(unused)}" if unused else ""
        return f"{self.name} sets {words or 'nothing that zerofit has a flag for'}{rest}"

    @property
    def detail(self) -> str:
        """The keys that are not imported and change no result; empty if there are none."""
        unused = [key for key in self.left_out if _only_runs(key)]
        return f"not used of {self.name}, without effect on results: {', '.join(unused)}" if unused else ""


def _only_runs(key: str) -> bool:
    """Return True if a key of a DeepSpeed file decides how a run computes or logs, and not what it trains."""
    section, _, rest = key.partition(".")
    return section in _OF_THE_RUN or (section == "zero_optimization" and rest in _OF_ZERO)


_OF_THE_RUN = frozenset(
    (
        *("activation_checkpointing", "aio", "steps_per_print", "wall_clock_breakdown", "flops_profiler"),
        *("comms_logger", "tensorboard", "wandb", "comet", "csv_monitor", "dump_state", "memory_breakdown"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    )
)
"""Sections and keys of a DeepSpeed file that change no result."""
_OF_ZERO = frozenset(
    (
        *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter"),
        *("reduce_bucket_size", "contiguous_gradients", "round_robin_gradients", "sub_group_size"),
        *("use_multi_rank_bucket_allreduce", "stage3_prefetch_bucket_size", "stage3_max_live_parameters"),
        *("stage3_param_persistence_threshold", "stage3_max_reuse_distance"),
        *("offload_optimizer.pin_memory", "offload_optimizer.buffer_count", "offload_optimizer.fast_init"),
        *("offload_optimizer.pipeline_read", "offload_optimizer.pipeline_write"),
        *("offload_param.pin_memory", "offload_param.buffer_count", "offload_param.buffer_size"),
        "offload_param.max_in_cpu",
    )
)
"""The same of zero_optimization: ZeRO++ quantizes, and a misspelt key has an effect that nobody knows."""


def read_config_files(
    *,
    config_file: str | None,
    deepspeed_file: str | None,
    takes_default: bool,
    line: LaunchCommand | None = None,
    is_of_line: bool = False,
    num_nodes: int | None = None,
) -> ConfigFiles | None:
    """Return the settings in the files; None if there is none.

    Args:
        config_file: of `accelerate config`.
        deepspeed_file: DeepSpeed's JSON.
        takes_default: True to read the file in accelerate's cache if `config_file` is None.
        line: of `accelerate launch`, if the run is given as one.
        is_of_line: True if this line names the files, so that its flags decide which engine runs.
        num_nodes: the flag that overrides the file's number of nodes.

    Raises:
        UserError: a file has a setting of FSDP that accelerate refuses, or that has no counterpart.
        ExceptionGroup: of a UserError for each file that does not exist or can't be parsed, and for what
            accelerate or DeepSpeed refuses in one.
    """
    if config_file is None and deepspeed_file is None and not takes_default:
        return None
    words = ["accelerate", "launch"]
    words += [] if config_file is None else ["--config_file", config_file]
    words += [] if deepspeed_file is None else ["--deepspeed_config_file", deepspeed_file]
    if line is not None and is_of_line:
        words += [flag.text for flag in line.flags if flag.name in _PARADIGMS]
    elif deepspeed_file is not None:
        words.append("--use_deepspeed")
    targets = read_targets(
        words, schemas=load_schemas(probe_versions()), stdin=io.BytesIO().read, reads_default=takes_default
    )
    situation = situations(targets)[0]
    is_named = config_file is not None or deepspeed_file is not None
    checked = replace(
        situation,
        missing=(
            *_missing(config_file, deepspeed_file),
            *(said for said in situation.missing if said.place is not None),
        ),
        broken=situation.broken if is_named else (),
    )
    if errors := check(checked, rules=ON_READING).of(Severity.ERROR):
        raise ExceptionGroup("files that can't be read", [error.as_error() for error in errors])
    engine = situation.settings.engine
    runs_deepspeed = engine is None or engine.value is Engine.DEEPSPEED
    accelerate, deepspeed = files = (situation.accelerate, situation.deepspeed if runs_deepspeed else None)
    documents = [file for file in files if file is not None]
    if not documents:
        return None
    used = None if accelerate is None or deepspeed_file is not None else accelerate
    fsdp_words = None if used is None else words_of_accelerate(used, line=line, num_nodes=num_nodes)
    fsdp = None if fsdp_words is None else read_fsdp(fsdp_words)
    said = {
        **_settings(situation.settings, documents[0]),
        **(_numbers(*files) if runs_deepspeed else {}),
        **_groups(*files),
        **(fsdp.said if fsdp is not None else {}),
    }
    has_engine = engine is not None and runs_deepspeed  # accelerate then hands use_cpu on to no rank
    is_for_cpu = accelerate is not None and accelerate.value("use_cpu") is True
    if deepspeed is None and engine is not None and engine.place is None:  # by a flag of the line
        said = {name: value for name, value in said.items() if value.place is not None}
    placed = {
        name: replace(value, place=value.place or Place(file=documents[0].name, line=0))
        for name, value in said.items()
    }
    return ConfigFiles(
        name=documents[0].name,
        overrides=Overrides(said=placed),
        buckets=_buckets(deepspeed),
        nodes=_nodes(accelerate),
        on_cpu=is_for_cpu and not has_engine,
        engine="FSDP" if fsdp is not None else _engine_words(said),
        left_out=(
            *(("use_cpu",) if is_for_cpu and has_engine else ()),
            *(_left_out(deepspeed) if deepspeed else ()),
        ),
        by_script=tuple(field for key, field in _SCRIPT_FIELDS.items() if deepspeed.value(key) == "auto")
        if deepspeed
        else (),
        batch={} if deepspeed is None else _batch(deepspeed),
        ignored=() if line is None else _ignored(line, situation),
        notes=() if fsdp is None else fsdp.notes,
    )


def _ignored(line: LaunchCommand, situation: Situation) -> tuple[Flag, ...]:
    """Return the flags of a line that accelerate ignores with its files, or in whose place one decides."""
    command = situation.command
    if command is None:
        return ()
    own = tuple(flag for flag in line.flags if flag.name not in _PARADIGMS)
    layers = LaunchLayers(file=situation.accelerate, command=replace(command, flags=(*command.flags, *own)))
    return ineffective_flags(layers, situation.deepspeed)


def _missing(config_file: str | None, deepspeed_file: str | None) -> list[Said[str]]:
    """Return the files that don't exist, as the user named them."""
    is_inline = deepspeed_file is not None and inline_json(deepspeed_file) is not None
    names = (config_file, None if is_inline else deepspeed_file)
    return [Said(value=name, text=name) for name in names if name is not None and not os.path.exists(name)]


def with_files(
    said: Overrides, files: ConfigFiles, *, is_planned: bool, has_strategy: bool = False
) -> tuple[Overrides, tuple[str, ...]]:
    """Return overrides completed by those of files, and sentences on settings for another engine.

    Args:
        said: from flags, which take precedence.
        files: the settings of the files.
        is_planned: True if zerofit, a preset or a plan chooses the strategy instead of the files.
        has_strategy: True if a preset or a plan chooses it.
    """
    engine, of_files = _engine_of(said), files.overrides.get("engine")
    keeps = of_files is Engine.FSDP2 and engine in (None, Engine.FSDP2) and not has_strategy
    if is_planned or (engine is Engine.NATIVE and of_files is not Engine.FSDP2):
        dropped = {*PLANNED_FIELDS, *OF_FSDP2} - {*(_KEPT_OF_FSDP2 if keeps else ())}
        both = said.over(files.overrides)
        return both.without(name for name in dropped if not said.has(name)), ()
    if engine is None or engine is of_files:
        return said.over(files.overrides), ()
    changed, notes = changed_engine(files.overrides, to=engine, buckets=tuple(files.buckets))
    return said.over(changed), notes


def _engine_of(said: Overrides) -> Engine | None:
    """Return the engine that flags ask for, in words, by a stage of ZeRO or a setting of FSDP2."""
    engine: Engine | None = with_engine_of(said).get("engine")
    return Engine.DEEPSPEED if engine is None and said.get("zero_stage") else engine


def nodes_with_files(nodes: Nodes, files: ConfigFiles, *, on_cpu: bool) -> Nodes:
    """Return the nodes completed by those of files; on the CPU without GPUs."""
    own = {name: said.value for name, said in files.nodes.items()}
    if nodes.ranks_per_node is not None or nodes.gpu_ids is not None:
        own.pop("num_processes", None)
    if on_cpu:
        own.pop("gpu_ids", None)
    return replace(nodes, **{name: value for name, value in own.items() if getattr(nodes, name) is None})


def _settings(settings: RunSettings, file: Document) -> dict[str, Said[Any]]:
    """Return strategy and precision by field of Strategy; settings outside files are left out."""
    all_said: dict[str, Said[Any] | None] = {
        "engine": settings.engine,
        "zero_stage": settings.zero_stage,
        "optimizer_offload": settings.optimizer_offload,
        "param_offload": settings.param_offload,
        "nvme_path": settings.optimizer_nvme_path or settings.param_nvme_path,
        "precision": settings.precision,
    }
    nothing = (None, "none", OffloadDevice.NONE, Precision.FP32)
    said = {
        name: setting
        for name, setting in all_said.items()
        if setting is not None and setting.value not in nothing
    }
    if settings.engine is None or settings.engine.value is not Engine.DEEPSPEED:
        said = {name: setting for name, setting in said.items() if name in ("engine", "precision")}
        if file.value("distributed_type") not in ("MULTI_GPU", "MULTI_CPU", "NO"):
            said.pop("engine", None)
    return said


def _numbers(accelerate: Document | None, deepspeed: Document | None) -> dict[str, Said[Any]]:
    """Return accumulation and clipping, if a file has numbers for them.

    accelerate converts texts in its file ("4" to 4); DeepSpeed refuses them in its own.
    """
    numbers = {}
    for name, converted in (
        ("gradient_accumulation_steps", whole_number),
        ("gradient_clipping", finite_number),
    ):
        for document, path in (
            (accelerate, (DEEPSPEED_SECTION, name)),
            (deepspeed, IN_DEEPSPEED_FILE[name]),
        ):
            said = document.said(*path) if document is not None else None
            if said is None:
                continue
            number = (
                finite_number(said.value) if isinstance(said.value, int | float) else converted(said.value)
            )
            if number is not None and number > 0:
                numbers[name] = replace(said, value=number)
    return numbers


def _batch(deepspeed: Document) -> dict[str, Said[int]]:
    """Return the numbers of samples in a DeepSpeed file, by field."""
    said = {name: deepspeed.said(key) for key, name in _BATCH_KEYS.items()}
    numbers = {name: (size, whole_number(size.value)) for name, size in said.items() if size is not None}
    return {name: replace(size, value=number) for name, (size, number) in numbers.items() if number}


def _precision_keys(deepspeed: Document) -> list[str]:
    """Return the keys of the precision in use that are set otherwise than by default."""
    sections = [(name, deepspeed.value(name)) for name in ("fp16", "bf16")]
    return [
        f"{name}.{key}"
        for name, section in sections
        if isinstance(section, dict) and section.get("enabled", False) is not False
        for key, value in section.items()
        if key not in _NO_PRECISION and value != _PRECISION_DEFAULTS.get(key)
    ]


def _left_out(deepspeed: Document) -> tuple[str, ...]:
    """Return the keys of a DeepSpeed file that have no counterpart in zerofit."""
    section, size = _TENSOR_PARALLEL_KEY
    beside = deepspeed.value(section)
    keys = [entry.key for entry in deepspeed.root.entries if entry.key not in _KNOWN_KEYS.split()]
    keys += [f"{section}.{key}" for key in (beside if isinstance(beside, dict) else ()) if key != size]
    zero = deepspeed.value("zero_optimization")
    of_zero = [key for key in (zero if isinstance(zero, dict) else ()) if key not in _KNOWN_ZERO_KEYS.split()]
    return (*keys, *_precision_keys(deepspeed), *(f"zero_optimization.{key}" for key in of_zero))


def _groups(accelerate: Document | None, deepspeed: Document | None) -> dict[str, Said[Any]]:
    """Return the sizes of tensor- and sequence-parallel groups in the files, by field of Topology."""
    groups = {}
    for name, document, path in (
        ("tensor_parallel_size", deepspeed, _TENSOR_PARALLEL_KEY),
        ("tensor_parallel_size", accelerate, (_PARALLELISM, f"{_PARALLELISM}_tp_size")),
        ("sequence_parallel_size", accelerate, (_PARALLELISM, f"{_PARALLELISM}_sp_size")),
    ):
        said = document.said(*path) if document is not None else None
        if said is not None and (whole_number(said.value) or 1) > 1:
            groups[name] = said
    return groups


def _nodes(file: Document | None) -> dict[str, Said[Any]]:
    nodes: dict[str, Said[Any]] = {}
    for name, key in _NODE_KEYS.items() if file is not None else ():
        said = file.said(key) if file is not None else None
        value = None if said is None else said.value
        value = whole_number(value) if name not in ("main_process_ip", "gpu_ids") else value
        if said is None or value is None or value == "all" or (name == "num_nodes" and value == 1):
            continue
        nodes[name] = replace(said, value=value)
    return nodes


def _buckets(file: Document | None) -> dict[str, int | str]:
    """Return the sizes of ZeRO's buckets in a DeepSpeed file, by field of Buckets."""
    zero = file.value("zero_optimization") if file is not None else None
    section = zero if isinstance(zero, dict) else {}
    said = {field.name: section.get(field.name) for field in fields(Buckets)}
    return {
        name: "auto" if value == "auto" else int(value)
        for name, value in said.items()
        if value == "auto" or (isinstance(value, int | float) and value > 0)
    }


def _engine_words(said: dict[str, Said[Any]]) -> str:
    """Return the engine and its offload, with the file: "DeepSpeed ZeRO-3, offload cpu (acc.yaml)"."""
    if "engine" not in said or said["engine"].value is not Engine.DEEPSPEED:
        return ""
    stage = f" ZeRO-{said['zero_stage'].value.value}" if "zero_stage" in said else ""
    offloads = {said[name].value.value for name in ("optimizer_offload", "param_offload") if name in said}
    offload = f", offload to {' and '.join(sorted(offloads))}" if offloads else ""
    return f"DeepSpeed{stage}{offload}"
