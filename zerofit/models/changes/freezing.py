"""Freezes parameters of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest
from zerofit.core.freezing import ALL_BUT_HEAD, WORDS, frozen_names, matches, num_frozen_blocks, stacks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SHOWN = 8
"""Maximum number of modules listed in a message."""


def freeze(model: Any, patterns: Sequence[str]) -> tuple[str, ...]:
    """Freeze the parameters selected by keywords or patterns, which need no gradients or optimizer states.

    A tied parameter matches under any of its names. Dropout in frozen modules stays on, and batch norms
    still update their running statistics.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training.
        patterns: keywords and shell patterns (see zerofit.core.freezing).

    Returns:
        A note on what was frozen; empty without patterns.

    Raises:
        UserError: a pattern matches nothing, or nothing would remain trainable.
    """
    if not patterns:
        return ()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    prefix = base_prefix_of(model)
    for pattern in patterns:
        _check_names(model, pattern, tuple(parameters), prefix)
    names = frozen_names(parameters, patterns, base_prefix=prefix)
    frozen = {id(parameters[name]) for name in names}
    if not any(parameter.requires_grad and id(parameter) not in frozen for parameter in model.parameters()):
        raise _nothing_trains(model, patterns, names, parameters)
    for name in names:
        parameters[name].requires_grad_(False)
        parameters[name].grad = None
    num_frozen = num_elements(parameter for parameter in model.parameters() if not parameter.requires_grad)
    num_all = num_elements(model.parameters())
    said = ", ".join(patterns)
    return (f"{num_frozen:,} of {num_all:,} parameters of {type(model).__name__} are frozen ({said})",)


def base_prefix_of(model: Any) -> str | None:
    """Return the name of a model's base module, for zerofit.core.freezing; "" if the model is a base itself.

    None for other libraries' models, and for classes such as T5ForConditionalGeneration, whose encoder and
    decoder are beside the head.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    prefix = str(model.base_model_prefix)
    if prefix and prefix in model._modules:
        return prefix
    return "" if model.get_output_embeddings() is None else None


def num_elements(parameters: Iterable[Any]) -> int:
    """Return the total number of elements, of whole parameters if ZeRO-3 has partitioned them."""
    return sum(int(getattr(parameter, "ds_numel", None) or parameter.numel()) for parameter in parameters)


def _check_names(model: Any, pattern: str, names: tuple[str, ...], prefix: str | None) -> None:
    num_wanted = num_frozen_blocks(pattern) or 0
    num_blocks = max(stacks_of(names).values(), default=0)
    if num_wanted > num_blocks:
        raise UserError(
            "freeze-too-many-blocks",
            "the model has fewer blocks than should be frozen",
            found=f"freezing of {pattern}, and {type(model).__name__} with {num_blocks} blocks",
            why="the number counts the blocks of each stack, starting at the input",
            fix=f"use embeddings+{num_blocks} or less, or {ALL_BUT_HEAD}",
        )
    if not matches(names, pattern, base_prefix=prefix):
        raise UserError(
            "freeze-matches-nothing",
            "no parameter has such a name",
            found=f"freezing of {pattern!r}, and {type(model).__name__}",
            why=f"its parameters are {', '.join(_modules(names))}",
            fix=f"give {_near(pattern, names)}",
        )


def _near(pattern: str, names: tuple[str, ...]) -> str:
    """Suggest a pattern instead of one that matches nothing: a module that contains it, or a similar name."""
    modules = {name.rpartition(".")[0] for name in names}
    modules |= {
        ".".join(module.split(".")[:end]) for module in modules for end in range(1, module.count(".") + 1)
    }
    plain = pattern.strip("*.")
    inner = sorted((module for module in modules if module.endswith(plain)), key=len)
    found = inner[0] if plain and inner else nearest(plain, sorted(modules))
    shown = f"{found}.*" if found else _modules(names)[0]
    if shown == "*":  # would freeze the whole model
        shown = names[0]
    pattern_said = f"'{shown}'" if found else f"a pattern such as '{shown}'"
    return f"{pattern_said}, or one of the keywords {', '.join(WORDS)}"


def _modules(names: Iterable[str]) -> list[str]:
    """Return patterns for a model's modules, one for all blocks of a stack."""
    parts: dict[str, None] = {}
    for name in names:
        words = name.split(".")[:-1]
        number = next((place for place, word in enumerate(words) if word.isdigit()), len(words))
        parts[".".join([*words[:number], "*"])] = None
    shown = [*parts]
    return shown[:_SHOWN] + ["..."] * (len(shown) > _SHOWN)


def _nothing_trains(
    model: Any, patterns: Sequence[str], names: frozenset[str], parameters: dict[str, Any]
) -> UserError:
    said, name = ", ".join(patterns), type(model).__name__
    why = "every parameter that the script trains would be frozen"
    fix = "freeze less, such as embeddings+1"
    if ALL_BUT_HEAD in patterns:
        frozen = {id(parameters[key]): key for key in names}
        tied = [
            parameter
            for parameter in parameters
            if parameter not in names and id(parameters[parameter]) in frozen
        ]
        if base_prefix_of(model) == "":
            why = f"{name} has no head: it is a base model"
        elif tied:
            inner = frozen[id(parameters[tied[0]])]
            why = f"its head {tied[0]} is tied to {inner}, which is part of the base model"
    return UserError(
        "freeze-leaves-nothing",
        "nothing would be left to train",
        found=f"freezing of {said}, and {name}",
        why=why,
        fix=fix,
    )
