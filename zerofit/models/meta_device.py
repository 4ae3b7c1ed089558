"""Models built by transformers' own classes on the meta device: no weights, no network."""

from __future__ import annotations

import copy
import json
import os
import re
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest
from zerofit.core.upstream.transformers import set_name_or_path_of
from zerofit.models.source import LocatedConfig, ModelOrigin, ModelSizes
from zerofit.models.task import Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def transformers_config(located: LocatedConfig, *, trust_remote_code: bool) -> PretrainedConfig:
    """Return transformers' config object, with the family's defaults filled in.

    Where code of the model's own may run, it is that of the place where the config was found, wherever the
    config says it once was saved: transformers would follow it there.

    Raises:
        UserError: the installed transformers does not know the family, or refuses a value; or the model needs
            Python code of its own, which nobody allowed to run, or which lies elsewhere.
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
    """Return where a model's own code is read from: the folder of its config, or its hub id."""
    is_local = located.origin in (ModelOrigin.FOLDER, ModelOrigin.FILE)
    return os.path.abspath(located.place) if is_local else located.place


def needs_remote_code(located: LocatedConfig, found: str) -> UserError:
    """Return the error for a model that only code of its own can build."""
    return UserError(
        "model-needs-remote-code",
        "this model's classes are Python files of its own, which zerofit does not run unasked",
        found=f"auto_map in the config of {located.name}; {found}",
        why="such code can do anything on this machine",
        fix="read that code; if you trust it, add --trust-remote-code",
        see="https://huggingface.co/docs/transformers/models#custom-models",
    )


def _configured(values: dict[str, Any], code_from: str | None) -> PretrainedConfig:
    """Return the config of transformers' own class, or of the one in a model's own code, if told where."""
    from transformers import AutoConfig

    if code_from is None:
        return AutoConfig.for_model(**values)
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config_class: Any = get_class_from_dynamic_module(values["auto_map"]["AutoConfig"], code_from)
    config: PretrainedConfig = config_class.from_dict(values)
    return config


def _without_places(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without what makes transformers fetch from elsewhere; its parts without code, too.

    Those are the place where it once was saved, and attention kernels of a repository on the hub, which
    transformers may download and run.
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
"""A file beside the config, without its .py, and a class in it: no folder, no other repository."""


def _own_code(code: dict[str, Any], located: LocatedConfig) -> dict[str, str]:
    """Return the model classes that auto_map names, each in a file beside the config.

    Raises:
        UserError: one of them is elsewhere: nobody was asked to trust that place.
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
                "the config names code outside of the model's own place, which zerofit does not run",
                found=f"auto_map of {located.name}: {auto_class} is {json.dumps(reference)[:200]}",
                why=f"--trust-remote-code trusts the files of {located.place}, and no others",
                fix="copy the code beside config.json, read it, and write FILE.CLASS there",
                see="https://huggingface.co/docs/transformers/models#custom-models",
            )
        own[auto_class] = within
    return own


def available_tasks(config: PretrainedConfig, *, with_own_code: bool = False) -> tuple[Task, ...]:
    """Return the tasks that transformers has a class for in the config's family.

    An encoder-decoder's decoder alone, or an encoder made causal, is another model: those are left out.

    Args:
        with_own_code: whether classes of the model's own code count too, whether or not they may run.
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
    parameters = list(model.parameters())
    return ModelSizes(
        architecture=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable_parameters=sum(part.numel() for part in parameters if part.requires_grad),
        num_largest_layer_parameters=_largest_layer(model),
        largest_parameter=max((parameter.numel() for parameter in parameters), default=0),
    )


def _largest_layer(model: PreTrainedModel) -> int:
    """Return the parameters of the largest member of any list of modules: transformers keeps blocks so."""
    import torch

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    blocks = [block for modules in lists for block in modules]
    return max((sum(part.numel() for part in block.parameters()) for block in blocks), default=0)


def _build(config: PretrainedConfig, task: Task, *, trust_remote_code: bool) -> PreTrainedModel:
    import torch
    import transformers

    auto_class = getattr(transformers, task.auto_class)
    with torch.device("meta"):
        return auto_class.from_config(config, trust_remote_code=trust_remote_code)


def _class_of(config: PretrainedConfig, task: Task) -> Any:
    """Return the name, or names, of transformers' class for a family and a task; None without one."""
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
        why="the family came after that release, or the word is misspelt",
        fix="upgrade transformers, or mend model_type",
        see="https://huggingface.co/models",
    )


def _refused(located: LocatedConfig, error: Exception) -> UserError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UserError(
        "model-config-refused",
        "transformers refuses this config",
        found=f"the config of {located.name}: {' '.join(lines)[:300] or type(error).__name__}",
        why="its classes can't be built from these values",
        fix="mend the value that the message names",
    )
