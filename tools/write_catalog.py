"""python -m tools.write_catalog: adds what the installed libraries read to zerofit/catalog/.

With names of files it prints what the installed libraries alone say of them, and writes nothing.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from tools.schemas.deepspeed_schema import probe_deepspeed_schema
from tools.schemas.hugging_face_schemas import probe_accelerate_schema, probe_training_arguments_schema
from tools.schemas.launcher_schemas import (
    probe_accelerate_launch_schema,
    probe_deepspeed_launcher_schema,
    probe_torchrun_schema,
    probe_zerofit_launch_schema,
)
from tools.schemas.new_release import with_release
from tools.schemas.render import render_schema
from zerofit.configs.schemas.catalog import load_history
from zerofit.core.catalog_folder import CATALOG_FOLDER
from zerofit.machine.versions import probe_versions
from zerofit.models.catalog import CatalogModel, catalog_models
from zerofit.models.meta_device import available_tasks, measure_sizes, transformers_config
from zerofit.models.source import LocatedConfig, ModelOrigin, ModelSizes
from zerofit.models.task import Task

FOLDER = Path(CATALOG_FOLDER)
PROBES = {
    "deepspeed": probe_deepspeed_schema,
    "accelerate": probe_accelerate_schema,
    "accelerate_launch": probe_accelerate_launch_schema,
    "torchrun": probe_torchrun_schema,
    "deepspeed_launcher": probe_deepspeed_launcher_schema,
    "zerofit_launch": probe_zerofit_launch_schema,
    "training_arguments": probe_training_arguments_schema,
}
"""What reads each file of the catalog off the installed library."""


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
                if field not in ("num_blocks", "can_checkpoint")  # named by the configs, and true of all
            )
            lines.append(f"{task.value} = {{ {fields} }}")
    return "\n".join(lines) + "\n"


def write_catalog() -> None:
    """Write each schema with the installed release added, and the models' sizes as transformers has them."""
    for name, probe in PROBES.items():
        schema = with_release(load_history(name), probe())
        (FOLDER / f"{name}.json").write_text(render_schema(schema), encoding="utf-8")
    measured = {name: measure_model(model) for name, model in catalog_models().items()}
    sizes = render_sizes(measured, probe_versions().transformers or "")
    (FOLDER / "model_sizes.toml").write_text(sizes, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(*(render_schema(PROBES[name]()) for name in sys.argv[1:]), sep="\0", end="")
    else:
        write_catalog()
