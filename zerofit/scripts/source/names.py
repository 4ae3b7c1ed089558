"""Classification of library names: models, schedulers, optimizers, trainers, ranks."""

from __future__ import annotations

import ast
import re

from zerofit.core.optimizers.lookup import entry_of, library_of, optimizer_of_class

ACCELERATORS = {"accelerate.Accelerator", "accelerate.accelerator.Accelerator"}
ACCUMULATION_PLUGINS = {
    f"accelerate.{module}GradientAccumulationPlugin" for module in ("", "utils.", "utils.dataclasses.")
}
PROJECT_CONFIGURATIONS = {
    f"accelerate.{module}ProjectConfiguration" for module in ("", "utils.", "utils.dataclasses.")
}
GRAD_SCALERS = {
    f"torch.{module}.GradScaler" for module in ("amp", "cuda.amp", "amp.grad_scaler", "cuda.amp.grad_scaler")
}
RANK_CALLS = {
    "torch.distributed.get_rank",
    "torch.distributed.get_node_local_rank",
    "deepspeed.comm.get_rank",
    "deepspeed.comm.get_local_rank",
}
BARRIERS = {"torch.distributed.barrier", "deepspeed.comm.barrier"}
REDUCTIONS = {
    f"{package}.{name}"
    for package in ("torch.distributed", "deepspeed.comm", "accelerate.utils")
    for name in (
        "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast",
        "broadcast_object_list", "gather", "gather_object", "reduce",
    )
}  # fmt: skip
TENSOR_GATHERS = {
    f"{package}.{name}"
    for package in ("torch.distributed", "deepspeed.comm", "accelerate.utils")
    for name in ("all_gather", "all_gather_into_tensor", "gather")
}
"""Need tensors of the same shape on all ranks."""
GENERATES = {"zerofit.generate", "zerofit.generation.generate.generate"}
PARSE_CALLS = {
    "parse_args_into_dataclasses",
    "parse_json_file",
    "parse_yaml_file",
    "parse_dict",
    "parse_args_and_config",
}
PLAIN_ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
"""transformers' own, whose fields and defaults the catalog has; TRL's classes have others."""
PLUGINS = {f"accelerate.{module}DeepSpeedPlugin" for module in ("", "utils.", "utils.dataclasses.")}
FSDP_PLUGINS = {
    f"accelerate.{module}FullyShardedDataParallelPlugin" for module in ("", "utils.", "utils.dataclasses.")
}
QUANTIZERS = {f"transformers.{module}BitsAndBytesConfig" for module in ("", "utils.quantization_config.")}
ARGUMENT_PARSERS = {"argparse.ArgumentParser"}
DEEPSPEED_ARGUMENTS = {"deepspeed.add_config_arguments"}
"""Adds options to a parser and returns it: --deepspeed and --deepspeed_config, not --local_rank."""
DEEPSPEED_OPTIONS = ("--deepspeed", "--deepspeed_config", "--deepscale", "--deepscale_config")
ZERO_INIT = "deepspeed.zero.Init"
RANK_SETUPS = {
    "deepspeed.init_distributed",
    "deepspeed.comm.init_distributed",
    *(f"accelerate.{module}PartialState" for module in ("", "state.")),
}
"""Make DeepSpeed know the ranks; torch's init_process_group() alone does not: its own module counts one."""
LOADS = {
    f"{package}.{name}" for package in ("json", "hjson", "json5", "commentjson") for name in ("load", "loads")
}
COPIES = {"copy.copy", "copy.deepcopy"}
PATH = "pathlib.Path"
GATHERED = {"deepspeed.zero.GatheredParameters", "deepspeed.runtime.zero.GatheredParameters"}
DUMMY_SCHEDULERS = {f"accelerate.{module}DummyScheduler" for module in ("", "utils.", "utils.deepspeed.")}
PREFIX_TUNING = {f"peft.{module}PrefixTuningConfig" for module in ("", "tuners.", "tuners.prefix_tuning.")}
SAMPLERS_OF_RANKS = frozenset(
    {"torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"}
)
EARLY_STOPPING = {f"transformers.{module}EarlyStoppingCallback" for module in ("", "trainer_callback.")}
SHARD_MERGES = {f"accelerate.utils.{module}merge_fsdp_weights" for module in ("", "fsdp_utils.")} | {
    f"torch.distributed.fsdp.{module}FullyShardedDataParallel.{method}"
    for module in ("", "fully_sharded_data_parallel.")
    for method in ("set_state_dict_type", "state_dict_type")
}

_TRANSFORMERS_MODEL = re.compile(
    r"transformers\.(?:.*\.)?(?!TF|Flax|DataCollator)[A-Z]\w*?(?:Model|For[A-Z]\w+|LMHeadModel)"
)
_DIFFUSERS_MODEL = re.compile(r"diffusers\.(?:.*\.)?(?:[A-Z]\w*Model|Autoencoder\w*|VQModel)")
_PIPELINE = re.compile(
    r"diffusers\.(?:.*\.)?[A-Z]\w*Pipeline\w*|transformers\.(?:.*\.)?(?:pipeline|[A-Z]\w*Pipeline)"
)
_PEFT_MODEL = re.compile(r"peft\.(?:.*\.)?(?:Auto)?PeftModel\w*")
_TRAINER = re.compile(r"(?:transformers|trl)\.(?:.*\.)?\w*Trainer")
_ARGUMENTS = re.compile(r"(?:transformers|trl)\.(?:.*\.)?\w*TrainingArguments")
_TRL_CONFIG = re.compile(
    r"trl\.(?:.*\.)?(?:SFT|DPO|GRPO|KTO|ORPO|CPO|BCO|PPO|RLOO|Reward|PRM|GKD|XPO|OnlineDPO|NashMD)Config"
)
_OPTIMIZER = re.compile(r"(?:\w+\.)*[A-Z]\w*")

_MIXED_LIBRARIES = ("apex", "deepspeed")
"""Libraries whose packages of optimizers have other classes as well."""
_OPTIMIZER_WORDS = ("Adam", "Lion", "Lamb", "Adagrad")


def called_name(call: ast.Call) -> str:
    """Return the last part of a called function's name; "" if it has none."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def is_model_class(name: str) -> bool:
    """Return True if a dotted name is a model class of transformers or peft."""
    return bool(_TRANSFORMERS_MODEL.fullmatch(name)) or is_peft_model(name)


def is_peft_model(name: str) -> bool:
    """Return True if a dotted name is a class of peft's models with adapters."""
    return bool(_PEFT_MODEL.fullmatch(name))


def is_diffusers_model(name: str) -> bool:
    """True if a dotted name is a model class of diffusers, which ZeRO-3 does not partition on loading."""
    return bool(_DIFFUSERS_MODEL.fullmatch(name))


def is_pipeline(name: str) -> bool:
    """True if a dotted name creates an object that holds models and runs them when called."""
    return bool(_PIPELINE.fullmatch(name))


def is_auto_class(name: str) -> bool:
    """Return True if a model class only has from_pretrained() and from_config()."""
    return name.rpartition(".")[2].startswith(("Auto", "Peft"))


def is_trainer(name: str) -> bool:
    """Return True if a dotted name is a Trainer of transformers or TRL."""
    return bool(_TRAINER.fullmatch(name))


def is_called_trainer(name: str) -> bool:
    """Return True if a class of any module is called a trainer: "dataloader.CustomTrainerForgetting"."""
    last = name.rpartition(".")[2]
    return "Trainer" in last and last[:1].isupper() and not last.endswith(("Arguments", "Config", "Callback"))


def is_arguments(name: str) -> bool:
    """Return True if a dotted name is TrainingArguments or a subclass in TRL."""
    return bool(_ARGUMENTS.fullmatch(name) or _TRL_CONFIG.fullmatch(name))


def optimizer_id(name: str, *, takes_parameters: bool) -> str | None:
    """Return the id of the optimizer class with a dotted name, or None."""
    id_, last = optimizer_of_class(name), name.rpartition(".")[2]
    if entry_of(id_) is not None:
        return id_
    if not _OPTIMIZER.fullmatch(name) or "lr_scheduler" in name or "swa_utils" in name or last == "Optimizer":
        return None
    library = library_of(name)
    if library in _MIXED_LIBRARIES:
        return id_ if any(word in last for word in _OPTIMIZER_WORDS) else None
    return id_ if library or takes_parameters else None
