"""Settings and models that make ranks run different forward passes, so that they get out of step."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.deepspeed import is_gathered_whole
from zerofit.generation.call_settings import CallSettings
from zerofit.generation.gathering import is_available, partitioned_parameters
from zerofit.ranks.exchange import say

_ITS_OWN_LOOP = "its loop is not transformers' own, and runs a different number of passes"
OUT_OF_STEP = {
    "assistant_model": "another model drafts tokens, in additional passes",
    "assistant_early_exit": "the model's first layers draft tokens, in additional passes",
    "use_mtp": "the model's own heads draft tokens, in additional passes",
    "prefill_chunk_size": "a longer prompt goes through the model in more chunks",
    "guidance_scale": "each token needs a second pass, on unfinished ranks only",
    "token_healing": "each prompt's last token is generated again, in additional passes",
    "cache_implementation": "continuous batching runs as many passes as its own prompts need",
    "custom_generate": _ITS_OWN_LOOP,
    "penalty_alpha": _ITS_OWN_LOOP,
    "dola_layers": _ITS_OWN_LOOP,
    "num_beam_groups": _ITS_OWN_LOOP,
    "constraints": _ITS_OWN_LOOP,
    "force_words_ids": _ITS_OWN_LOOP,
}
"""Settings of generate() with which ranks run different numbers of passes, whatever synced_gpus is: why.
prompt_lookup_num_tokens is not among them: a round drafts without the model, and is one pass. Source:
transformers (5.23), generation/utils.py, _assisted_decoding, _prefill, heal_tokens and
GENERATION_MODES_MAPPING; generation/logits_process.py, UnbatchedClassifierFreeGuidanceLogitsProcessor."""
_WITHOUT_EFFECT = {"guidance_scale": 1, "num_beam_groups": 1, "penalty_alpha": 0}
"""Values that disable a setting, beside None and False."""


def goes_out_of_step(name: str, value: Any) -> bool:
    """Return True if this value of a setting of OUT_OF_STEP gets ranks out of step."""
    if name == "cache_implementation":
        return bool(value == "paged")
    return value is not None and value is not False and value != _WITHOUT_EFFECT.get(name)


def settings_in_step(settings: CallSettings, model: Any) -> CallSettings:
    """Return settings with which ranks run the same forward passes for any prompts."""
    named = _differing_passes(settings, model)
    if named is not None:
        raise UserError(
            "generate-out-of-step",
            "ranks would run different numbers of forward passes, and wait for each other forever",
            found=f"{named}, with weights partitioned by ZeRO-3",
            why="every rank must take part in all forward passes of the others",
            fix='gather the weights at once, with gather="always", or leave it out',
        )
    check_experts(model)
    config = copy.deepcopy(settings.config)
    if config.use_cache is False:
        say("use_cache=False is ignored: a finished rank continues beside the others with its cache")
    # Its passes repeat its last token; without a cache, the sequence would no longer fit the growing mask.
    # The cache does not change results.
    config.use_cache = True
    return dataclasses.replace(settings, config=config)


def uncompiled(settings: CallSettings) -> CallSettings:
    """Return settings without compilation, since compiled passes bypass ZeRO's hooks."""
    config = copy.deepcopy(settings.config)
    config.disable_compile = True
    return dataclasses.replace(settings, config=config)


def check_experts(model: Any, *, found_at: str = "") -> None:
    """Check that ZeRO-3 gathers a model's experts together, if they are separate modules.

    Args:
        found_at: the script's line followed by ": ", for the error message.
    """
    experts = _experts_apart(model)
    if experts is None:
        return
    raise UserError(
        "generate-experts-apart",
        "ranks would gather the weights of different experts, and wait for each other forever",
        found=f"{found_at}{experts}, with weights partitioned by ZeRO-3",
        why="tokens are routed to different experts on each rank, and ZeRO-3 gathers experts one by one",
        fix="before deepspeed.initialize() or prepare(): deepspeed.utils.set_z3_leaf_modules(model, [the "
        "class of the block around the experts]); or gather the weights at once, with "
        'zerofit.generate(gather="always")',
        see="https://deepspeed.readthedocs.io/en/latest/training.html#mixture-of-experts-moe",
    )


def check_assistant(settings: CallSettings, *, batch_size: int) -> None:
    """Check that assisted generation, if used, has a batch of one and an unpartitioned assistant."""
    assistant = settings.objects.get("assistant_model")
    config = settings.config
    is_assisted = assistant is not None or config.prompt_lookup_num_tokens or config.assistant_early_exit
    if is_assisted and batch_size > 1:
        raise UserError(
            "generate-assisted-one-by-one",
            "assisted generation supports one prompt at a time",
            found=f"batch_size={batch_size}",
            why="transformers verifies the proposed tokens of a single sequence",
            fix="pass batch_size=1, or leave the assistant out",
        )
    if assistant is not None and not all(map(is_available, partitioned_parameters(assistant))):
        raise UserError(
            "generate-out-of-step",
            "ranks would run different numbers of forward passes, and wait for each other forever",
            found="assistant_model, whose weights ZeRO-3 partitions over the ranks",
            why="it only runs as long as its rank has prompts",
            fix="load the assistant before the DeepSpeed configuration is created, or leave it out",
        )


def _differing_passes(settings: CallSettings, model: Any) -> str | None:
    """Return the setting or model that makes ranks run different forward passes, or None."""
    from transformers import GenerationMixin

    for name in OUT_OF_STEP:
        if goes_out_of_step(name, settings.objects.get(name, getattr(settings.config, name, None))):
            return name
    # An instance has its own from a custom_generate folder of the hub, or from DeepSpeed's hybrid engine.
    if type(model).generate is not GenerationMixin.generate or "generate" in vars(model):
        return f"{type(model).__name__}, which has its own generate()"
    if not {"past_key_values", "cache_params"} & set(inspect.signature(model.forward).parameters):
        return f"{type(model).__name__}, which has no cache"
    return None


def _experts_apart(model: Any) -> str | None:
    """Return the name of separate experts that ZeRO-3 does not gather together, or None."""
    from torch.nn import ModuleDict, ModuleList

    leaves = [f"{name}." for name, module in model.named_modules() if is_gathered_whole(module)]
    for name, module in model.named_modules():
        # In transformers 5.23, Switch and NLLB-MoE have a ModuleDict; most store experts in one weight.
        are_separate = name.endswith("experts") and isinstance(module, ModuleList | ModuleDict)
        if are_separate and not any(f"{name}.".startswith(leaf) for leaf in leaves):
            return str(name)
    return None
