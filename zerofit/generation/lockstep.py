"""Settings and models with which ranks make different forward passes, so that they fall out of step."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.deepspeed import is_gathered_whole
from zerofit.generation.call_settings import CallSettings
from zerofit.generation.gathering import is_available, partitioned_parameters
from zerofit.generation.ranks.ranks import say

_ITS_OWN_LOOP = "its loop is not that of transformers, and makes passes of its own"
OUT_OF_STEP = {
    "assistant_model": "another model drafts tokens, in passes of its own",
    "assistant_early_exit": "the model's first layers draft tokens, in passes of their own",
    "use_mtp": "the model's own heads draft tokens, in passes of their own",
    "prefill_chunk_size": "a longer prompt goes through the model in more chunks",
    "guidance_scale": "each token takes a second pass, on a rank that has not ended",
    "token_healing": "each prompt's last token is generated anew, in passes of its own",
    "cache_implementation": "continuous batching makes as many passes as its own prompts take",
    "custom_generate": _ITS_OWN_LOOP,
    "penalty_alpha": _ITS_OWN_LOOP,
    "dola_layers": _ITS_OWN_LOOP,
    "num_beam_groups": _ITS_OWN_LOOP,
    "constraints": _ITS_OWN_LOOP,
    "force_words_ids": _ITS_OWN_LOOP,
}
"""Settings of generate() with which ranks make different numbers of passes, whatever synced_gpus is: why.
prompt_lookup_num_tokens is none of them: a round drafts without the model, and is one pass.
Source: transformers (5.23), generation/utils.py, _assisted_decoding, _prefill, heal_tokens and
GENERATION_MODES_MAPPING; generation/logits_process.py, UnbatchedClassifierFreeGuidanceLogitsProcessor."""
_WITHOUT_EFFECT = {"guidance_scale": 1, "num_beam_groups": 1, "penalty_alpha": 0}
"""Values with which a setting does nothing, beside None and False."""


def goes_out_of_step(name: str, value: Any) -> bool:
    """True if a setting of OUT_OF_STEP takes ranks out of step with this value."""
    if name == "cache_implementation":
        return bool(value == "paged")
    return value is not None and value is not False and value != _WITHOUT_EFFECT.get(name)


def settings_in_step(settings: CallSettings, model: Any) -> CallSettings:
    """Return settings with which ranks make the same forward passes, whatever their prompts."""
    named = _differing_passes(settings, model)
    if named is not None:
        raise UserError(
            "generate-out-of-step",
            "ranks would make different numbers of forward passes, and wait for each other for ever",
            found=f"{named}, and weights that ZeRO-3 partitions over the ranks",
            why="every rank must take part in every forward pass of every other",
            fix='gather the weights once, with gather="always", or do without it',
        )
    check_experts(model)
    config = copy.deepcopy(settings.config)
    if config.use_cache is False:
        say("use_cache=False is not kept: a rank that has ended goes on beside the others with its cache")
    # Its passes feed its last token again; without a cache, all its tokens would no longer fit the mask,
    # which grows. The cache changes no result.
    config.use_cache = True
    return dataclasses.replace(settings, config=config)


def uncompiled(settings: CallSettings) -> CallSettings:
    """Return settings with which no pass is compiled: ZeRO's hooks stand around those that are not."""
    config = copy.deepcopy(settings.config)
    config.disable_compile = True
    return dataclasses.replace(settings, config=config)


def check_experts(model: Any, *, found_at: str = "") -> None:
    """Check that ZeRO-3 gathers a model's experts together, where it has separate ones.

    Args:
        found_at: the script's line with ": ", where the error is to name it.
    """
    experts = _experts_apart(model)
    if experts is None:
        return
    raise UserError(
        "generate-experts-apart",
        "ranks would gather the weights of different experts, and wait for each other for ever",
        found=f"{found_at}{experts}, and weights that ZeRO-3 partitions over the ranks",
        why="each rank's tokens go to experts of their own, which ZeRO-3 gathers one by one",
        fix="before deepspeed.initialize() or prepare(): deepspeed.utils.set_z3_leaf_modules(model, [the "
        "class of the block around the experts]); or gather the weights once, with "
        'zerofit.generate(gather="always")',
        see="https://deepspeed.readthedocs.io/en/latest/training.html#mixture-of-experts-moe",
    )


def check_assistant(settings: CallSettings, *, batch_size: int) -> None:
    """Check that assisted generation, if it is on, has a batch of one and a whole assistant."""
    assistant = settings.objects.get("assistant_model")
    config = settings.config
    is_assisted = assistant is not None or config.prompt_lookup_num_tokens or config.assistant_early_exit
    if is_assisted and batch_size > 1:
        raise UserError(
            "generate-assisted-one-by-one",
            "assisted generation takes one prompt at a time",
            found=f"batch_size={batch_size}",
            why="transformers checks the proposed tokens of one sequence",
            fix="pass batch_size=1, or leave the assistant out",
        )
    if assistant is not None and not all(map(is_available, partitioned_parameters(assistant))):
        raise UserError(
            "generate-out-of-step",
            "ranks would make different numbers of forward passes, and wait for each other for ever",
            found="assistant_model, whose weights ZeRO-3 partitions over the ranks",
            why="it proposes as long as its rank has prompts, and no longer",
            fix="load the assistant before there is a DeepSpeed configuration, or leave it out",
        )


def _differing_passes(settings: CallSettings, model: Any) -> str | None:
    """Return the setting or model with which ranks make different forward passes; None without."""
    from transformers import GenerationMixin

    for name in OUT_OF_STEP:
        if goes_out_of_step(name, settings.objects.get(name, getattr(settings.config, name, None))):
            return name
    # An instance has its own from a custom_generate folder of the hub, or from DeepSpeed's hybrid engine.
    if type(model).generate is not GenerationMixin.generate or "generate" in vars(model):
        return f"{type(model).__name__}, which has a generate() of its own"
    if not {"past_key_values", "cache_params"} & set(inspect.signature(model.forward).parameters):
        return f"{type(model).__name__}, which has no cache"
    return None


def _experts_apart(model: Any) -> str | None:
    """Return the name of separate experts that ZeRO-3 does not gather together; None without."""
    from torch.nn import ModuleDict, ModuleList

    leaves = [f"{name}." for name, module in model.named_modules() if is_gathered_whole(module)]
    for name, module in model.named_modules():
        # Of transformers 5.23, Switch and NLLB-MoE have a ModuleDict; most have their experts in one weight.
        are_separate = name.endswith("experts") and isinstance(module, ModuleList | ModuleDict)
        if are_separate and not any(f"{name}.".startswith(leaf) for leaf in leaves):
            return str(name)
    return None
