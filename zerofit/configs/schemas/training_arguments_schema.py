"""The fields of TrainingArguments, as the installed transformers has them."""

from __future__ import annotations

import dataclasses
from enum import Enum
from importlib.metadata import version
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from zerofit.configs.schema import Key, OnUnknown, Removed, Schema, Section, ValueKind
from zerofit.core.upstream.transformers import CHECKPOINTING_BEFORE_5_23

_KINDS: dict[Any, ValueKind] = {
    bool: ValueKind.BOOL,
    int: ValueKind.INTEGER,
    float: ValueKind.NUMBER,
    str: ValueKind.STRING,
    dict: ValueKind.SECTION,
    list: ValueKind.LIST,
    type(None): ValueKind.NULL,
}
_REPLACED = {older: name for name, older in CHECKPOINTING_BEFORE_5_23.items()}
"""Fields that TrainingArguments.__post_init__ still reads, with a warning, where it has the new ones."""
REMOVED = {
    "adafactor": "optim=adafactor",
    "dispatch_batches": 'accelerator_config={"dispatch_batches": ...}',
    "evaluate_during_training": "eval_strategy=steps",
    "evaluation_strategy": "eval_strategy",
    "fp16_backend": "leave it out",
    "fp16_opt_level": "leave it out",
    "fsdp_min_num_params": 'fsdp_config={"min_num_params": ...}',
    "fsdp_transformer_layer_cls_to_wrap": 'fsdp_config={"transformer_layer_cls_to_wrap": ...}',
    "group_by_length": "train_sampling_strategy=group_by_length",
    "half_precision_backend": "leave it out",
    "include_inputs_for_metrics": "include_for_metrics=inputs",
    "include_tokens_per_second": "include_num_input_tokens_seen",
    "jit_mode_eval": "leave it out",
    "logging_dir": "the environment variable TENSORBOARD_LOGGING_DIR",
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
    "sharded_ddp": "fsdp or deepspeed",
    "split_batches": 'accelerator_config={"split_batches": ...}',
    "torchdynamo": "torch_compile_backend",
    "tpu_metrics_debug": "debug=tpu_metrics_debug",
    "tpu_num_cores": "leave it out",
    "use_ipex": "leave it out",
    "use_legacy_prediction_loop": "leave it out",
    "use_mps_device": "leave it out: the device is found",
    "warmup_ratio": "warmup_steps with a number below 1",
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
            keys=tuple(_key(field, hints[field.name], names) for field in fields),
            on_unknown=OnUnknown.REJECTS,
        ),
        removed=tuple(
            Removed(path=(name,), instead=instead) for name, instead in REMOVED.items() if name not in names
        ),
    )


def _key(field: dataclasses.Field[Any], hint: Any, names: set[str]) -> Key:
    replaced_by = _REPLACED.get(field.name)
    members = _members(hint)
    enum = next((member for member in members if isinstance(member, type) and issubclass(member, Enum)), None)
    choices = field.metadata.get("choices") or ([member.value for member in enum] if enum else ())
    kinds = dict.fromkeys(_kind(member) for member in members)
    return Key(
        name=field.name,
        kinds=tuple(kind for kind in kinds if kind),
        converts=True,
        choices=tuple(choices),
        replaced_by=replaced_by if replaced_by in names else None,
    )


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _kind(member: Any) -> ValueKind | None:
    origin = get_origin(member) or member
    if origin is Literal:
        return ValueKind.BOOL
    if isinstance(origin, type) and issubclass(origin, Enum):
        return ValueKind.STRING
    return _KINDS.get(origin)
