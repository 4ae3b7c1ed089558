"""What ranks can't do in step: settings and models with which they make different forward passes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from typing import Any

from zerofit.errors import UserError
from zerofit.generation.call_settings import OWN_PASSES, CallSettings


def settings_in_step(settings: CallSettings, model: Any) -> CallSettings:
    """Return settings with which ranks make the same forward passes, whatever their prompts.

    Args:
        settings: of the calls, which stay as they are.
        model: of transformers, whose weights ZeRO-3 partitions.

    Raises:
        UserError: a setting makes passes of its own, or the model runs other parts for other tokens.
    """
    named = _unlike(settings, model)
    if named is not None:
        raise UserError(
            "generate-out-of-step",
            "ranks would make different numbers of forward passes, and wait for each other for ever",
            found=f"{named}, and weights that ZeRO-3 partitions over the ranks",
            why="every rank must take part in every forward pass of every other",
            fix='gather the weights once, with gather="always", or do without it',
        )
    experts = _experts_apart(model)
    if experts is not None:
        raise UserError(
            "generate-experts-apart",
            "ranks would gather the weights of different experts, and wait for each other for ever",
            found=f"{experts}, and weights that ZeRO-3 partitions over the ranks",
            why="each rank's tokens go to experts of their own, which ZeRO-3 gathers one by one",
            fix="before deepspeed.initialize() or prepare(): deepspeed.utils.set_z3_leaf_modules(model, [the "
            'class of the block around the experts]); or gather the weights once, with gather="always"',
            see="https://deepspeed.readthedocs.io/en/latest/training.html#mixture-of-experts-moe",
        )
    config = copy.deepcopy(settings.config)
    if config.use_cache is False:
        _say("use_cache=False is not kept: a rank that has ended goes on beside the others with its cache")
    # Its passes feed its last token again; without a cache, all its tokens would no longer fit the mask,
    # which grows. The cache changes no result.
    config.use_cache = True
    config.disable_compile = True  # ZeRO's hooks stand around the passes that are not compiled
    return dataclasses.replace(settings, config=config)


def check_assistant(settings: CallSettings, *, batch_size: int) -> None:
    """Check that tokens can be proposed by an assistant, where one is asked for.

    Raises:
        UserError: transformers can't in batches, or ZeRO-3 partitions the assistant.
    """
    from zerofit.generation.gathering import is_available, partitioned_parameters

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


def _say(line: str) -> None:
    from torch import distributed

    if distributed.get_rank() == 0:
        print(f"zerofit: {line}", file=sys.stderr, flush=True)


def _unlike(settings: CallSettings, model: Any) -> str | None:
    """Return what makes other passes on one rank than on another."""
    from transformers import GenerationMixin
    from transformers.generation import GenerationMode

    config = settings.config
    given = [name for name in OWN_PASSES if name in settings.objects]
    given += [
        name
        for name in ("prefill_chunk_size", "prompt_lookup_num_tokens", "assistant_early_exit")
        if getattr(config, name) is not None
    ]
    given += [name for name in ("use_mtp", "token_healing") if getattr(config, name)]
    if config.guidance_scale not in (None, 1):
        given.append("guidance_scale")  # a second pass a token, on ranks that have not ended
    if given:
        return given[0]
    one_pass_a_token = (
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
        GenerationMode.BEAM_SEARCH,
        GenerationMode.BEAM_SAMPLE,
    )
    mode = config.get_generation_mode(None)
    if mode not in one_pass_a_token:
        return f"{mode.value} generation"
    if type(model).generate is not GenerationMixin.generate:
        return f"{type(model).__name__}, which has a generate() of its own"
    if not {"past_key_values", "cache_params"} & set(inspect.signature(model.forward).parameters):
        return f"{type(model).__name__}, which has no cache"
    return None


def _experts_apart(model: Any) -> str | None:
    """Return the name of a list of experts that ZeRO-3 does not gather together."""
    from torch.nn import ModuleList

    leaves = [
        f"{name}." for name, module in model.named_modules() if getattr(module, "_z3_leaf", False) is True
    ]
    for name, module in model.named_modules():
        is_list = name.endswith("experts") and isinstance(module, ModuleList)
        if is_list and not any(f"{name}.".startswith(leaf) for leaf in leaves):
            return str(name)
    return None
