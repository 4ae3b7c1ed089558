"""Builds models by transformers' own classes on the meta device: no weights, no network."""

from __future__ import annotations

import copy
import json
import os
import re
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest
from zerofit.core.upstream.checkpointing import can_checkpoint
from zerofit.core.upstream.transformers import set_name_or_path_of
from zerofit.models.source import LocatedConfig, ModelOrigin, ModelSizes
from zerofit.models.task import Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def transformers_config(located: LocatedConfig, *, trust_remote_code: bool) -> PretrainedConfig:
    """Return transformers' config object, with the family's defaults filled in.

    Custom code, if allowed, is read from where the config was found, even if the config names another place
    where it was once saved, which transformers would use.

    Raises:
        UserError: the installed transformers does not know the family, or refuses a value; or the model
            needs custom Python code that was not allowed to run, or that is elsewhere.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type, code = located.config["model_type"], located.config.get("auto_map") or {}
    is_known = model_type in CONFIG_MAPPING_NAMES
    if not is_known and "AutoConfig" not in code:
        raise _unknown_family(located, tuple(CONFIG_MAPPING_NAMES))
    if not is_known and not trust_remote_code:
        raise needs_remote_code(located, f"transformers has no class for {model_type}")
    place = _code_place(located)
    values = _without_places(copy.deepcopy(located.config))
    if trust_remote_code and code:
        values["auto_map"] = _own_code(code, located)
    try:
        config = _configured(values, None if is_known else place)
    except Exception as error:
        raise _refused(located, error) from error
    set_name_or_path_of(config, place)
    return config


def _code_place(located: LocatedConfig) -> str:
    """Return where a model's custom code is read from: the folder of its config, or its hub id."""
    is_local = located.origin in (ModelOrigin.FOLDER, ModelOrigin.FILE)
    return os.path.abspath(located.place) if is_local else located.place


def needs_remote_code(located: LocatedConfig, found: str) -> UserError:
    """Return the error for a model that needs custom code."""
    return UserError(
        "model-needs-remote-code",
        "this model needs its own Python code, which zerofit does not run unasked",
        found=f"auto_map in the config of {located.name}; {found}",
        why="such code can do anything on this machine",
        fix="read that code; if you trust it, add --trust-remote-code",
        see="https://huggingface.co/docs/transformers/models#custom-models",
    )


def _configured(values: dict[str, Any], code_from: str | None) -> PretrainedConfig:
    """Return the config of transformers' own class, or of custom code if its place is given."""
    from transformers import AutoConfig

    if code_from is None:
        return AutoConfig.for_model(**values)
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config_class: Any = get_class_from_dynamic_module(values["auto_map"]["AutoConfig"], code_from)
    config: PretrainedConfig = config_class.from_dict(values)
    return config


def _without_places(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without references to other places; for sub-configurations also without code.

    These are the place where it was once saved, and attention kernels in a hub repository, which transformers
    may download and run.
    """
    kept = {
        key: value
        for key, value in config.items()
        if key not in ("_name_or_path", "name_or_path")
        and not (key.endswith("attn_implementation") and "/" in str(value))
    }
    for key, value in kept.items():
        if isinstance(value, dict) and key.endswith("_config"):
            kept[key] = {inner: each for inner, each in _without_places(value).items() if inner != "auto_map"}
    return kept


_OWN_CODE = re.compile(r"\w[\w-]*\.\w+")
"""Matches a module beside the config and a class in it: no folder, no other repository."""


def _own_code(code: dict[str, Any], located: LocatedConfig) -> dict[str, str]:
    """Return the model classes in auto_map, each in a file beside the config.

    Raises:
        UserError: one of them is elsewhere, a place that the user was not asked to trust.
    """
    own = {}
    for auto_class, reference in code.items():
        if not auto_class.startswith(("AutoConfig", "AutoModel")):
            continue
        text = reference if isinstance(reference, str) else ""
        repository, mark, within = text.rpartition("--")
        if (mark and repository != located.place) or not _OWN_CODE.fullmatch(within):
            raise UserError(
                "model-code-elsewhere",
                "the config refers to code elsewhere, which zerofit does not run",
                found=f"auto_map of {located.name}: {auto_class} is {json.dumps(reference)[:200]}",
                why=f"--trust-remote-code only trusts the files of {located.place}",
                fix="copy the code beside config.json, read it, and write FILE.CLASS there",
                see="https://huggingface.co/docs/transformers/models#custom-models",
            )
        own[auto_class] = within
    return own


def available_tasks(config: PretrainedConfig, *, with_own_code: bool = False) -> tuple[Task, ...]:
    """Return the tasks that transformers has a class for in the config's family.

    Left out are an encoder-decoder's decoder alone and an encoder made causal, which are different models.

    Args:
        with_own_code: include classes of the model's custom code, even if they may not run.
    """
    own = (getattr(config, "auto_map", None) or {}) if with_own_code else {}
    found = {task for task in Task if task.auto_class in own or _class_of(config, task)}
    if config.is_encoder_decoder:
        found -= {Task.CAUSAL_LM, Task.MASKED_LM}
    elif Task.MASKED_LM in found:
        found -= {Task.CAUSAL_LM}
    return tuple(task for task in Task if task in found)


def measure_sizes(
    config: PretrainedConfig, task: Task, *, located: LocatedConfig, trust_remote_code: bool = False
) -> ModelSizes:
    """Return the sizes of a model, counted on transformers' own class.

    Raises:
        UserError: transformers can't build the class from these values.
    """
    try:
        model = _build(config, task, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _refused(located, error) from error
    parameters, blocks = list(model.parameters()), _lists_of_blocks(model)
    return ModelSizes(
        architecture=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable_parameters=sum(part.numel() for part in parameters if part.requires_grad),
        num_largest_layer_parameters=max((count for _, count in blocks), default=0),
        largest_parameter=max((parameter.numel() for parameter in parameters), default=0),
        num_blocks=max((number for number, _ in blocks), default=0),
        can_checkpoint=can_checkpoint(model),
    )


def _lists_of_blocks(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Return for each ModuleList, in which transformers stores blocks, its length and its largest member."""
    import torch

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    members = [list(modules.children()) for modules in lists]  # not None, as iteration gives
    counts = [[sum(part.numel() for part in block.parameters()) for block in blocks] for blocks in members]
    return [(len(blocks), max(blocks, default=0)) for blocks in counts]


def _build(config: PretrainedConfig, task: Task, *, trust_remote_code: bool) -> PreTrainedModel:
    import torch
    import transformers

    auto_class = getattr(transformers, task.auto_class)
    with torch.device("meta"):
        return auto_class.from_config(config, trust_remote_code=trust_remote_code)


def _class_of(config: PretrainedConfig, task: Task) -> Any:
    """Return the name, or names, of transformers' class for a family and a task; None if there is none."""
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, task.mapping).get(config.model_type)


def _unknown_family(located: LocatedConfig, known: tuple[str, ...]) -> UserError:
    import transformers

    model_type = located.config["model_type"]
    near = nearest(model_type, known)
    return UserError(
        "model-type-unknown",
        f"the installed transformers has no model of type {model_type}",
        found=f'"model_type": "{model_type}" in the config of {located.name}; transformers '
        f"{transformers.__version__}" + (f"; near: {near}" if near else ""),
        why="the family is newer than that release, or misspelt",
        fix="upgrade transformers, or fix model_type",
        see="https://huggingface.co/models",
    )


def _refused(located: LocatedConfig, error: Exception) -> UserError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UserError(
        "model-config-refused",
        "transformers refuses this config",
        found=f"the config of {located.name}: {' '.join(lines)[:300] or type(error).__name__}",
        why="its classes can't be built from these values",
        fix="fix the value that the message names",
    )
