"""zerofit/catalog/model_sizes.toml: the sizes of the catalog's models, from transformers' own classes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from zerofit.probe.model_catalog import CatalogModel, catalog_models
from zerofit.probe.model_meta import available_tasks, measure_sizes, transformers_config
from zerofit.probe.model_source import LocatedConfig, ModelOrigin

if TYPE_CHECKING:
    from zerofit.probe.model_source import ModelSizes
    from zerofit.probe.model_task import Task


def measure_catalog() -> dict[str, dict[Task, ModelSizes]]:
    """Return the sizes of every model of the catalog for each task, built on the meta device."""
    return {name: measure_model(model) for name, model in catalog_models().items()}


def measure_model(model: CatalogModel) -> dict[Task, ModelSizes]:
    """Return the sizes of one model of the catalog for each task."""
    located = LocatedConfig(
        name=model.name, config=model.config, origin=ModelOrigin.CATALOG, place=model.hub_ids[0]
    )
    config = transformers_config(located, trust_remote_code=False)
    return {task: measure_sizes(config, task, located=located) for task in available_tasks(config)}


def render_sizes(sizes: dict[str, dict[Task, ModelSizes]], transformers_version: str) -> str:
    """Return the text of model_sizes.toml: one line a model and task, so that changes read as a diff."""
    lines = [
        "# Sizes of the models in models.toml, in elements, a tied parameter once. Rendered: make catalog.",
        f'transformers = "{transformers_version}"',
    ]
    for name, heads in sizes.items():
        lines += ["", f'[models."{name}"]']
        for task, size in heads.items():
            fields = ", ".join(
                f'{field} = "{value}"' if isinstance(value, str) else f"{field} = {value}"
                for field, value in asdict(size).items()
            )
            lines.append(f"{task.value} = {{ {fields} }}")
    return "\n".join(lines) + "\n"
