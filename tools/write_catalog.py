"""python -m tools.write_catalog: adds what the installed libraries read to zerofit/catalog/.

With names of files it prints what the installed libraries alone say of them, and writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zerofit.configs.schemas.accelerate_schema import probe_accelerate_launch_schema, probe_accelerate_schema
from zerofit.configs.schemas.catalog import load_history, render_schema
from zerofit.configs.schemas.deepspeed_schema import probe_deepspeed_schema
from zerofit.configs.schemas.releases import with_release
from zerofit.configs.schemas.training_arguments_schema import probe_training_arguments_schema
from zerofit.core.catalog_folder import CATALOG_FOLDER
from zerofit.machine.versions import probe_versions
from zerofit.models.catalog import measure_catalog, render_sizes

FOLDER = Path(CATALOG_FOLDER)
PROBES = {
    "deepspeed": probe_deepspeed_schema,
    "accelerate": probe_accelerate_schema,
    "accelerate_launch": probe_accelerate_launch_schema,
    "training_arguments": probe_training_arguments_schema,
}
"""What reads each file of the catalog off the installed library."""


def write_catalog() -> None:
    """Write each schema with the installed release added, and the models' sizes as transformers has them."""
    for name, probe in PROBES.items():
        schema = with_release(load_history(name), probe())
        (FOLDER / f"{name}.json").write_text(render_schema(schema), encoding="utf-8")
    sizes = render_sizes(measure_catalog(), probe_versions().transformers or "")
    (FOLDER / "model_sizes.toml").write_text(sizes, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(*(render_schema(PROBES[name]()) for name in sys.argv[1:]), sep="\0", end="")
    else:
        write_catalog()
