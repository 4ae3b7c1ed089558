"""Compatibility rules: what fails or silently goes wrong, and why."""

from zerofit.checking.rule import Rule
from zerofit.checking.rules import model_changes, precision, precision_sources
from zerofit.checking.rules.accelerate import accumulation
from zerofit.checking.rules.accelerate import deepspeed_section as accelerate_deepspeed
from zerofit.checking.rules.accelerate import file as accelerate_file
from zerofit.checking.rules.deepspeed import auto as deepspeed_auto
from zerofit.checking.rules.deepspeed import batch as deepspeed_batch
from zerofit.checking.rules.deepspeed import file as deepspeed_file
from zerofit.checking.rules.deepspeed import keys as deepspeed_keys
from zerofit.checking.rules.deepspeed import offload, resume
from zerofit.checking.rules.deepspeed import spellings as deepspeed_spellings
from zerofit.checking.rules.deepspeed import switches as deepspeed_switches
from zerofit.checking.rules.deepspeed import values as deepspeed_values
from zerofit.checking.rules.launch import files as unreadable_files
from zerofit.checking.rules.launch import flags as launch_flags
from zerofit.checking.rules.launch import machines, named_files, ranks
from zerofit.checking.rules.optimizer import offload as optimizers
from zerofit.checking.rules.optimizer import section as optimizer_sections
from zerofit.checking.rules.optimizer import shards as optimizer_shards
from zerofit.checking.rules.script import arguments as script_arguments
from zerofit.checking.rules.script import generation as script_generation
from zerofit.checking.rules.script import inference as script_inference
from zerofit.checking.rules.script import loop as script_loop
from zerofit.checking.rules.script import order as script_order
from zerofit.checking.rules.script import ranks as script_ranks
from zerofit.checking.rules.trainer import arguments as trainer_arguments

ALL_RULES: tuple[Rule, ...] = (
    *accelerate_deepspeed.RULES,
    *accelerate_file.RULES,
    *accumulation.RULES,
    *deepspeed_auto.RULES,
    *deepspeed_batch.RULES,
    *deepspeed_file.RULES,
    *deepspeed_keys.RULES,
    *deepspeed_spellings.RULES,
    *deepspeed_switches.RULES,
    *deepspeed_values.RULES,
    *launch_flags.RULES,
    *machines.RULES,
    *model_changes.RULES,
    *named_files.RULES,
    *offload.RULES,
    *optimizer_sections.RULES,
    *optimizer_shards.RULES,
    *optimizers.RULES,
    *precision.RULES,
    *precision_sources.RULES,
    *ranks.RULES,
    *resume.RULES,
    *script_arguments.RULES,
    *script_generation.RULES,
    *script_inference.RULES,
    *script_loop.RULES,
    *script_order.RULES,
    *script_ranks.RULES,
    *trainer_arguments.RULES,
    *unreadable_files.RULES,
)
"""Every rule there is; nothing else decides what may be combined."""

__all__ = ["ALL_RULES", "Rule"]
