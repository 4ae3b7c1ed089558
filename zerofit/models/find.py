"""Finds a model by the user's name for it: its config, task head and facts, without reading weights."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from zerofit.core.errors import UserError
from zerofit.models.catalog import catalog_models, catalog_sizes
from zerofit.models.dimensions import IncompleteConfigError, facts_of
from zerofit.models.files import locate_config
from zerofit.models.source import LocatedConfig, ModelOrigin, ModelSizes, ModelSource
from zerofit.models.task import Task, task_of
from zerofit.models.weight_formats import said_format

_FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""torch's names of safetensors' floating-point dtypes."""


def probe_model(
    text: str,
    *,
    task: Task | None = None,
    trust_remote_code: bool = False,
    is_fast: bool = False,
    takes_quantized: bool = False,
) -> ModelSource:
    """Return what is known of a model.

    For a catalog model this imports neither torch nor transformers. Other models are built by transformers'
    own class without weights, and counted.

    Args:
        text: a folder with a config.json, such a file, a catalog name, or any hub id.
        task: the task of the head; None infers it from the config's architectures.
        trust_remote_code: whether the model's own Python code may run if transformers has no class for it.
        is_fast: read sizes from the headers of weight files, if there are any, instead of building the
            model's class, which imports torch.
        takes_quantized: whether the weights may be quantized, in a known format.

    Raises:
        UserError: no such model, no usable config, no class for the task, or code that was not allowed to
            run.
    """
    located = locate_config(text, takes_quantized=takes_quantized)
    if located.origin is ModelOrigin.CATALOG:
        heads = catalog_sizes(located.name)
        chosen, reason = _chosen(located, task, tuple(heads))
        return _source(located, chosen, reason, heads[chosen])
    is_packed = said_format(located.config) is not None  # its files have fewer elements than the model
    stored = _stored_sizes(located) if is_fast and not is_packed else None
    if stored is not None:
        chosen, reason = _chosen(located, task, _tasks_of_family(located.config["model_type"]))
        return _source(located, chosen, reason, stored)
    return _built(located, task, trust_remote_code=trust_remote_code)


def _built(located: LocatedConfig, task: Task | None, *, trust_remote_code: bool) -> ModelSource:
    from zerofit.models.meta_device import (
        available_tasks,
        measure_sizes,
        needs_remote_code,
        transformers_config,
    )

    config = transformers_config(located, trust_remote_code=trust_remote_code)
    chosen, reason = _chosen(located, task, available_tasks(config, with_own_code=True))
    if not trust_remote_code and chosen not in available_tasks(config):
        raise needs_remote_code(located, f"transformers has no {chosen.value} class for {config.model_type}")
    sizes = measure_sizes(config, chosen, located=located, trust_remote_code=trust_remote_code)
    filled = dataclasses.replace(located, config=_filled(located.config, config.to_dict()))
    source = _source(filled, chosen, reason, sizes)
    return dataclasses.replace(source, config=located.config, trust_remote_code=trust_remote_code)


def _filled(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a config completed by transformers' defaults, including sub-configurations."""
    parts = {
        key: _filled(value, defaults[key])
        for key, value in given.items()
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
    }
    return {**defaults, **given, **parts}


def _source(located: LocatedConfig, task: Task, reason: str, sizes: ModelSizes) -> ModelSource:
    try:
        facts = facts_of(located.name, located.config, task, sizes)
    except IncompleteConfigError as error:
        raise UserError(
            "model-config-incomplete",
            "a dimension of the model can't be found in its config",
            found=f"{located.name}: {error}",
            why="its family uses another key, or relies on a default of transformers",
            fix="add the key to config.json; without --fast, transformers fills in its defaults",
        ) from error
    if not facts.checkpoint_dtype:
        facts = dataclasses.replace(facts, checkpoint_dtype=_stored_dtype(located))
    is_known = located.origin is ModelOrigin.CATALOG
    return ModelSource(
        name=located.name,
        config=located.config,
        origin=located.origin,
        place=located.place,
        task=task,
        task_reason=reason,
        facts=facts,
        can_checkpoint=sizes.can_checkpoint,
        note=catalog_models()[located.name].note if is_known else "",
    )


def _chosen(located: LocatedConfig, task: Task | None, available: tuple[Task, ...]) -> tuple[Task, str]:
    if task in available:
        return task, f"--task {task.value}"
    found = task_of(located.config, available) if task is None else None
    if found is not None:
        return found
    words = ", ".join(each.value for each in available)
    raise UserError(
        "model-task-unknown",
        "transformers has no class for this model and task",
        found=f"--model {located.name}"
        + (f" --task {task.value}" if task else "")
        + f", of type {located.config['model_type']}",
        why=f"its family has {words}" if words else "its family supports no task of zerofit's",
        fix=f"--task {available[0].value}, or another of these" if available else "name another model",
    )


def _tasks_of_family(model_type: str) -> tuple[Task, ...]:
    """Return the tasks of the catalog's models of a family; all if it has none."""
    for name, model in catalog_models().items():
        if model.config["model_type"] == model_type:
            return tuple(catalog_sizes(name))
    return tuple(Task)


def _stored_sizes(located: LocatedConfig) -> ModelSizes | None:
    """Return the sizes from a folder's weight files; None if it has none."""
    elements = [math.prod(shape) for _, shape in _stored_tensors(located)]
    if not elements:
        return None
    return ModelSizes(
        architecture=next(iter(located.config.get("architectures") or ()), ""),
        num_parameters=sum(elements),
        num_trainable_parameters=sum(elements),
        num_largest_layer_parameters=0,
        largest_parameter=max(elements),
    )


def _stored_dtype(located: LocatedConfig) -> str:
    """Return the dtype of the first floating-point tensor in a folder's safetensors files; empty if none.

    transformers loads a model in it if its config names no dtype (transformers 5.23, modeling_utils.py,
    _get_dtype).
    """
    return next((_FLOATING[dtype] for dtype, _ in _stored_tensors(located) if dtype in _FLOATING), "")


def _stored_tensors(located: LocatedConfig) -> list[tuple[str, list[int]]]:
    """Return dtype and shape of each tensor in a folder's safetensors files, from their headers."""
    from safetensors import SafetensorError, safe_open

    if located.origin is not ModelOrigin.FOLDER:
        return []
    found = []
    try:
        for path in sorted(Path(located.place).glob("model*.safetensors")):
            with safe_open(path, framework="numpy") as file:
                names = file.keys()
                slices = [file.get_slice(name) for name in names]
                found += [(str(slice_.get_dtype()), list(slice_.get_shape())) for slice_ in slices]
    except (OSError, SafetensorError):
        return []
    return found
