"""Compatibility rules: what fails or silently goes wrong, and why."""

from zerofit.checking.rule import Rule
from zerofit.checking.rules import pipeline, precision
from zerofit.checking.rules.accelerate import deepspeed_section
from zerofit.checking.rules.accelerate import file as accelerate_file
from zerofit.checking.rules.deepspeed import (
    early_reads,
    expert_parallel,
    keys,
    offload,
    readers,
    schedules,
    sequence_parallel,
    switches,
    tensor_parallel,
    values,
)
from zerofit.checking.rules.fsdp import script as fsdp_script
from zerofit.checking.rules.fsdp import settings as fsdp_settings
from zerofit.checking.rules.fsdp import strategy as fsdp_strategy
from zerofit.checking.rules.fsdp import trainer as fsdp_trainer
from zerofit.checking.rules.fsdp import units as fsdp_units
from zerofit.checking.rules.launch import (
    batch_jobs,
    files,
    flags,
    hostfiles,
    machines,
    ranks,
    visible_gpus,
)
from zerofit.checking.rules.optimizer import rules as optimizers
from zerofit.checking.rules.script import arguments as script_arguments
from zerofit.checking.rules.script import checkpoints as script_checkpoints
from zerofit.checking.rules.script import generation as script_generation
from zerofit.checking.rules.script import gradients as script_gradients
from zerofit.checking.rules.script import inference as script_inference
from zerofit.checking.rules.script import limits as script_limits
from zerofit.checking.rules.script import loop as script_loop
from zerofit.checking.rules.script import models as script_models
from zerofit.checking.rules.script import order as script_order
from zerofit.checking.rules.script import ranks as script_ranks
from zerofit.checking.rules.script import schedules as script_schedules
from zerofit.checking.rules.trainer import arguments as trainer_arguments
from zerofit.checking.rules.trainer import generations as trainer_generations

ALL_RULES: tuple[Rule, ...] = (
    *deepspeed_section.RULES,
    *accelerate_file.RULES,
    *values.RULES,
    *readers.RULES,
    *early_reads.RULES,
    *keys.RULES,
    *switches.RULES,
    *schedules.RULES,
    *flags.RULES,
    *machines.RULES,
    *visible_gpus.RULES,
    *hostfiles.RULES,
    *ranks.RULES,
    *offload.RULES,
    *tensor_parallel.RULES,
    *sequence_parallel.RULES,
    *expert_parallel.RULES,
    *fsdp_strategy.RULES,
    *fsdp_settings.RULES,
    *fsdp_units.RULES,
    *fsdp_trainer.RULES,
    *fsdp_script.RULES,
    *optimizers.RULES,
    *pipeline.RULES,
    *precision.RULES,
    *script_arguments.RULES,
    *script_checkpoints.RULES,
    *script_generation.RULES,
    *script_gradients.RULES,
    *script_inference.RULES,
    *script_limits.RULES,
    *script_loop.RULES,
    *script_models.RULES,
    *script_order.RULES,
    *script_ranks.RULES,
    *script_schedules.RULES,
    *trainer_arguments.RULES,
    *trainer_generations.RULES,
    *files.RULES,
    *batch_jobs.RULES,
)
"""All rules about combinations of settings, and about what a script can't take."""

_OF_CAPTURES = ("one-model-per-accelerator", "prefix-tuning-without-checkpointing")
LIMITS: tuple[Rule, ...] = (
    *script_limits.RULES,
    *(rule for rule in ALL_RULES if rule.id in _OF_CAPTURES),
)
"""Those that a capture of the script decides."""
_OF_RANKS = (
    "num-processes-is-for-all-machines",
    "tensor-parallel-groups-not-whole",
    "sequence-parallel-groups-not-whole",
    "pipeline-parallel-groups-not-whole",
    "stages-per-rank-without-pipeline",
    "hybrid-shards-not-whole",
    "hybrid-shards-of-one-rank",
)
OF_RANKS: tuple[Rule, ...] = (*ranks.RULES, *(rule for rule in ALL_RULES if rule.id in _OF_RANKS))
"""Those on the number of ranks."""

DEEPSPEED_RULES: tuple[Rule, ...] = (
    *deepspeed_section.RULES,
    *values.RULES,
    *readers.RULES,
    *early_reads.RULES,
    *keys.RULES,
    *switches.RULES,
    *schedules.RULES,
    *offload.RULES,
)
"""Those that only concern runs with DeepSpeed."""

__all__ = ["ALL_RULES", "DEEPSPEED_RULES", "LIMITS", "OF_RANKS", "Rule"]
ON_READING: tuple[Rule, ...] = (
    *files.RULES,
    *accelerate_file.REFUSED_BY_ACCELERATE,
    *values.REFUSED_BY_DEEPSPEED,
)
"""Rules on files that the library that reads them refuses, so that half of one is never used."""
