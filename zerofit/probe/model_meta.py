"""Models built by transformers' own classes on the meta device: no weights, no network."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError, nearest
from zerofit.probe.model_source import LocatedConfig, ModelSizes, ModelSource
from zerofit.probe.model_task import Task

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


def build_on_meta(source: ModelSource, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return the real class for the task head, its parameters on torch's meta device and none of them filled.

    Args:
        source: what probe_model returned.
        dtype: of the parameters; None takes the config's own, as transformers does, else fp32.
    """
    located = LocatedConfig(name=source.name, config=source.config, origin=source.origin, place=source.place)
    config = transformers_config(located, trust_remote_code=source.trust_remote_code)
    return _build(config, source.task, dtype=dtype, trust_remote_code=source.trust_remote_code)


def parameter_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by name, in the model's order; a tied one under its first name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def transformers_config(located: LocatedConfig, *, trust_remote_code: bool) -> PretrainedConfig:
    """Return transformers' config object, with the family's defaults filled in.

    Raises:
        UserError: the installed transformers does not know the family, or refuses a value; or the model needs
            Python code of its own, which nobody allowed to run.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = located.config["model_type"]
    if model_type in CONFIG_MAPPING_NAMES:
        try:
            return AutoConfig.for_model(**copy.deepcopy(located.config))
        except Exception as error:
            raise _refused(located, error) from error
    if "auto_map" not in located.config:
        raise _unknown_family(located, tuple(CONFIG_MAPPING_NAMES))
    if not trust_remote_code:
        raise UserError(
            "model-needs-remote-code",
            "this model's classes are Python files of its own, which zerofit does not run unasked",
            found=f"auto_map in the config of {located.name}; transformers has no class for {model_type}",
            why="such code can do anything on this machine",
            fix="read that code; if you trust it, add --trust-remote-code",
            see="https://huggingface.co/docs/transformers/models#custom-models",
        )
    try:
        return AutoConfig.from_pretrained(located.place, trust_remote_code=True)
    except Exception as error:
        raise _refused(located, error) from error


def available_tasks(config: PretrainedConfig) -> tuple[Task, ...]:
    """Return the tasks that transformers has a class for in the config's family, remote code included.

    An encoder-decoder's decoder alone, or an encoder made causal, is another model: those are left out.
    """
    remote = getattr(config, "auto_map", None) or {}
    found = {task for task in Task if task.auto_class in remote or _class_of(config, task)}
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
        model = _build(config, task, dtype=None, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _refused(located, error) from error
    parameters = list(model.parameters())
    return ModelSizes(
        architecture=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable_parameters=sum(part.numel() for part in parameters if part.requires_grad),
        num_largest_layer_parameters=_largest_layer(model),
        largest_parameter=max(parameter.numel() for parameter in parameters),
    )


def _largest_layer(model: PreTrainedModel) -> int:
    """Return the parameters of the largest member of any list of modules: transformers keeps blocks so."""
    import torch

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    blocks = [block for modules in lists for block in modules]
    return max((sum(part.numel() for part in block.parameters()) for block in blocks), default=0)


def _build(
    config: PretrainedConfig, task: Task, *, dtype: torch.dtype | None, trust_remote_code: bool
) -> PreTrainedModel:
    import torch
    import transformers

    auto_class = getattr(transformers, task.auto_class)
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        return auto_class.from_config(config, trust_remote_code=trust_remote_code, **options)


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
