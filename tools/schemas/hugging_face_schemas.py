"""The keys of accelerate's file and of TrainingArguments, in the installed releases."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from enum import Enum
from importlib.metadata import version
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tools.schemas.launcher_schemas import probe_accelerate_launch_schema
from zerofit.configs.schema import Key, OnUnknown, Removed, Schema, Section, ValueKind
from zerofit.core.upstream.transformers import CHECKPOINTING_BEFORE_5_23

_FLAG_OR_WORD = (ValueKind.BOOL, ValueKind.STRING)
"""accelerate writes str(value).lower() == "true": true and "true" are the same."""
_SECTIONS = {
    "deepspeed_config": "",
    "fsdp_config": "fsdp_",
    "megatron_lm_config": "megatron_lm_",
    "dynamo_config": "dynamo_",
    "fp8_config": "fp8_",
    "mpirun_config": "mpirun_",
    "parallelism_config": "parallelism_config_",
}
"""The sections of the file, and how the flags begin that take their values over."""
_WITHOUT_PREFIX = ("fsdp_config", "dynamo_config", "fp8_config")
"""Sections in which accelerate puts the beginning before a key that lacks it (commands/launch.py)."""
_NOT_FLAGS = {"fsdp_config": ("fsdp_backward_prefetch_policy",)}
_RENAMED = {"fsdp_backward_prefetch_policy": "fsdp_config.fsdp_backward_prefetch"}
_DEEPSPEED_KINDS = {
    "deepspeed_config_file": (ValueKind.STRING,),
    "zero_stage": (ValueKind.INTEGER,),
    "gradient_accumulation_steps": (ValueKind.INTEGER, ValueKind.STRING),  # "auto"
    "gradient_clipping": (ValueKind.NUMBER, ValueKind.STRING),  # "auto"
    "zero3_init_flag": (ValueKind.BOOL,),
    "zero3_save_16bit_model": _FLAG_OR_WORD,
}
_DEEPSPEED_TEXTS = {
    "gradient_accumulation_steps": ("auto|[0-9]+", "a whole number or auto"),
    "gradient_clipping": (
        r"(?i:auto|\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*|inf)",
        "a number or auto",
    ),
}
"""Texts that DeepSpeedPlugin.__post_init__ converts with int() and float(), and how messages name them."""
_ROOT_KINDS = {
    "compute_environment": (ValueKind.STRING,),
    "distributed_type": (ValueKind.STRING, ValueKind.BOOL),  # YAML reads NO as false, which works
    "mixed_precision": (ValueKind.STRING, ValueKind.NULL),
    "use_cpu": _FLAG_OR_WORD,
    "debug": _FLAG_OR_WORD,
    "num_processes": (ValueKind.INTEGER,),
    "machine_rank": (ValueKind.INTEGER, ValueKind.NULL),
    "num_machines": (ValueKind.INTEGER,),
    "gpu_ids": (ValueKind.STRING, ValueKind.NULL),
    "main_process_ip": (ValueKind.STRING, ValueKind.NULL),
    "main_process_port": (ValueKind.INTEGER, ValueKind.NULL),
}
"""Types with which the launcher does what it should. It checks none, so that these come from its code."""
_CONVERTED = ("num_processes", "machine_rank", "zero_stage", "zero3_init_flag")
"""Keys that accelerate puts into a command line or into the environment, where 1 and "1" are the same."""
_LIMITS = {"main_process_port": (0, 65535)}
"""Least and greatest value of the numbers that have them; port 0 is any that is free."""
_REMOVED = {"ipex_config": "take it out: accelerate has no extension for Intel processors any more"}
_REPLACED = {"fp16": "mixed_precision", "dynamo_backend": "dynamo_config.dynamo_backend"}
"""Keys of former versions that BaseConfig.process_config still reads."""


def probe_accelerate_schema() -> Schema:
    """Return the keys of the file that `accelerate launch --config_file` reads on a machine of one's own."""
    from accelerate.commands.config.config_args import ClusterConfig

    flags = {key.name: key for key in probe_accelerate_launch_schema().root.keys}
    fields = [field.name for field in dataclasses.fields(ClusterConfig)]
    root = [_root_key(name, flags) for name in fields]
    old = [
        _dynamo_backend(replaced_by=now) if name == "dynamo_backend" else Key(name=name, replaced_by=now)
        for name, now in _REPLACED.items()
    ]
    return Schema(
        package="accelerate",
        version=version("accelerate"),
        root=Section(keys=(*root, *old), on_unknown=OnUnknown.REJECTS),
        removed=tuple(
            Removed(path=(name,), instead=instead) for name, instead in _REMOVED.items() if name not in fields
        ),
    )


def _root_key(name: str, flags: dict[str, Key]) -> Key:
    from accelerate.utils import ComputeEnvironment, DistributedType, PrecisionType

    if name in _SECTIONS:
        return Key(name=name, kinds=(ValueKind.SECTION, ValueKind.NULL), section=_section(name, flags))
    least, most = _LIMITS.get(name, (None, None))
    choices = {
        "compute_environment": ComputeEnvironment,
        "distributed_type": DistributedType,
        "mixed_precision": PrecisionType,
    }.get(name, ())
    return Key(
        name=name,
        kinds=_ROOT_KINDS.get(name, ()),
        converts=name in _CONVERTED,
        choices=tuple(choice.value for choice in choices),
        ignores_case=name == "mixed_precision",
        at_least=least,
        at_most=most,
    )


def _section(name: str, flags: dict[str, Key]) -> Section:
    if name == "deepspeed_config":
        return Section(keys=tuple(_deepspeed_keys(flags)), on_unknown=OnUnknown.IGNORES)
    prefix = _SECTIONS[name]
    keys = [
        _dynamo_backend(aliases=("backend",))
        if flag == "dynamo_backend"
        else Key(name=flag, aliases=(flag.removeprefix(prefix),) if name in _WITHOUT_PREFIX else ())
        for flag in flags
        if flag.startswith(prefix)
    ]
    old = [Key(name=key, replaced_by=_RENAMED[key]) for key in _NOT_FLAGS.get(name, ())]
    return Section(keys=(*keys, *old), on_unknown=OnUnknown.IGNORES)


def _dynamo_backend(*, aliases: tuple[str, ...] = (), replaced_by: str | None = None) -> Key:
    from accelerate.utils import DynamoBackend

    return Key(
        name="dynamo_backend",
        kinds=(ValueKind.STRING, ValueKind.NULL),
        choices=tuple(backend.value.lower() for backend in DynamoBackend),
        ignores_case=True,
        aliases=aliases,
        replaced_by=replaced_by,
    )


def _deepspeed_keys(flags: dict[str, Key]) -> list[Key]:
    """Return the DeepSpeed flags of the launcher, which are the keys of the section."""
    from accelerate.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS

    names = [
        name
        for name in flags
        if name.startswith(("deepspeed_", "offload_", "gradient_", "zero3_")) or name == "zero_stage"
    ]
    return [
        Key(
            name=name,
            kinds=(*_DEEPSPEED_KINDS.get(name, (ValueKind.STRING,)), ValueKind.NULL),
            converts=name in _CONVERTED,
            choices=tuple(DEEPSPEED_MULTINODE_LAUNCHERS)
            if name == "deepspeed_multinode_launcher"
            else flags[name].choices
            if name.endswith("_device")
            else (),
            ignores_case=name.endswith("_device"),
            pattern=_DEEPSPEED_TEXTS.get(name, ("", ""))[0],
            example=_DEEPSPEED_TEXTS.get(name, ("", ""))[1],
            at_least=0 if name == "zero_stage" else None,
            at_most=3 if name == "zero_stage" else None,
        )
        for name in names
    ]


_KINDS_OF_TYPES: dict[Any, ValueKind] = {
    bool: ValueKind.BOOL,
    int: ValueKind.INTEGER,
    float: ValueKind.NUMBER,
    str: ValueKind.STRING,
    dict: ValueKind.SECTION,
    list: ValueKind.LIST,
    type(None): ValueKind.NULL,
}
_REPLACED_FIELDS = {older: name for name, older in CHECKPOINTING_BEFORE_5_23.items()}
"""Fields that TrainingArguments.__post_init__ still reads, with a warning, where it has the new ones."""
REMOVED_FIELDS = {
    "adafactor": "optim=adafactor",
    "dispatch_batches": 'write accelerator_config={"dispatch_batches": ...}',
    "evaluate_during_training": "eval_strategy=steps",
    "evaluation_strategy": "eval_strategy",
    "fp16_backend": "leave it out",
    "fp16_opt_level": "leave it out",
    "fsdp_min_num_params": 'write fsdp_config={"min_num_params": ...}',
    "fsdp_transformer_layer_cls_to_wrap": 'write fsdp_config={"transformer_layer_cls_to_wrap": ...}',
    "group_by_length": "train_sampling_strategy=group_by_length",
    "half_precision_backend": "leave it out",
    "include_inputs_for_metrics": "include_for_metrics=inputs",
    "include_tokens_per_second": "include_num_input_tokens_seen",
    "jit_mode_eval": "leave it out",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "mp_parameters": "leave it out",
    "no_cuda": "use_cpu",
    "overwrite_output_dir": "leave it out: an output folder is written into as it is",
    "past_index": "leave it out",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_organization": "hub_model_id=ORGANIZATION/NAME",
    "push_to_hub_token": "hub_token",
    "ray_scope": "leave it out",
    "save_safetensors": "leave it out: weights are always saved as safetensors",
    "sharded_ddp": "write fsdp or deepspeed",
    "split_batches": 'write accelerator_config={"split_batches": ...}',
    "torchdynamo": "torch_compile_backend",
    "tpu_metrics_debug": "debug=tpu_metrics_debug",
    "tpu_num_cores": "leave it out",
    "use_ipex": "leave it out",
    "use_legacy_prediction_loop": "leave it out",
    "use_mps_device": "leave it out: the device is found",
    "warmup_ratio": "write warmup_steps with a number below 1",
    "xpu_backend": "ddp_backend",
}
"""Fields of transformers 3 and 4, and what does the same now. The program drops any that is back."""


def probe_training_arguments_schema() -> Schema:
    """Return the fields of Seq2SeqTrainingArguments, which are those of TrainingArguments and a few more."""
    from transformers import Seq2SeqTrainingArguments

    fields = dataclasses.fields(Seq2SeqTrainingArguments)
    hints = get_type_hints(Seq2SeqTrainingArguments)
    names = {field.name for field in fields}
    return Schema(
        package="transformers",
        version=version("transformers"),
        root=Section(
            keys=tuple(_field_key(field, hints[field.name], names) for field in fields),
            on_unknown=OnUnknown.REJECTS,
        ),
        removed=tuple(
            Removed(path=(name,), instead=instead)
            for name, instead in REMOVED_FIELDS.items()
            if name not in names
        ),
    )


def _field_key(field: dataclasses.Field[Any], hint: Any, names: set[str]) -> Key:
    replaced_by = _REPLACED_FIELDS.get(field.name)
    members = _members(hint)
    enum = next((member for member in members if isinstance(member, type) and issubclass(member, Enum)), None)
    choices = field.metadata.get("choices") or ([member.value for member in enum] if enum else ())
    keys = _fsdp_keys() if field.name == "fsdp_config" else ()
    kinds = dict.fromkeys(_kind(member) for member in members)
    return Key(
        name=field.name,
        kinds=tuple(kind for kind in kinds if kind),
        converts=True,
        choices=tuple(choices),
        replaced_by=replaced_by if replaced_by in names else None,
        section=Section(keys=keys, on_unknown=OnUnknown.IGNORES) if keys else None,
    )


def _fsdp_keys() -> tuple[Key, ...]:
    """Return the keys of fsdp_config that TrainingArguments reads, off the source of its own methods."""
    from transformers import TrainingArguments

    found = dict[str, None]()
    for method in (TrainingArguments._process_fsdp_args, TrainingArguments._apply_legacy_fsdp_to_config):
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        for node in ast.walk(tree):
            found |= dict.fromkeys(_keys_read(node))
    # The method drops the prefix.
    return tuple(Key(name=name, aliases=(f"fsdp_{name}",)) for name in found)


def _keys_read(node: ast.AST) -> Iterator[str]:
    """Yield the key that an expression reads of fsdp_config: by get(), setdefault(), [] or `in`."""
    match node:
        case ast.Call(func=ast.Attribute(attr="get" | "setdefault", value=owner), args=[key, *_]):
            pass
        case ast.Subscript(value=owner, slice=key):
            pass
        case ast.Compare(left=key, ops=[ast.In()], comparators=[owner]):
            pass
        case _:
            return
    if ast.unparse(owner) in ("self.fsdp_config", "fsdp_config") and isinstance(key, ast.Constant):
        yield str(key.value)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _kind(member: Any) -> ValueKind | None:
    origin = get_origin(member) or member
    if origin is Literal:
        return ValueKind.BOOL
    if isinstance(origin, type) and issubclass(origin, Enum):
        return ValueKind.STRING
    return _KINDS_OF_TYPES.get(origin)
