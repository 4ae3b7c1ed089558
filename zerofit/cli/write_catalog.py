"""python -m zerofit.cli.write_catalog: reads what zerofit/catalog/ has of the installed libraries anew."""

from __future__ import annotations

from pathlib import Path

from zerofit.probe.accelerate_schema import probe_accelerate_launch_schema, probe_accelerate_schema
from zerofit.probe.deepspeed_schema import probe_deepspeed_schema
from zerofit.probe.model_sizes import measure_catalog, render_sizes
from zerofit.probe.training_arguments_schema import probe_training_arguments_schema
from zerofit.probe.versions import probe_versions
from zerofit.render.catalog import render_schema

_FOLDER = Path(__file__).parents[1] / "catalog"
_PROBES = {
    "deepspeed": probe_deepspeed_schema,
    "accelerate": probe_accelerate_schema,
    "accelerate_launch": probe_accelerate_launch_schema,
    "training_arguments": probe_training_arguments_schema,
}


def write_catalog() -> None:
    """Write each schema that an installed library has, and the models' sizes as transformers builds them."""
    for name, probe in _PROBES.items():
        (_FOLDER / f"{name}.json").write_text(render_schema(probe()), encoding="utf-8")
    sizes = render_sizes(measure_catalog(), probe_versions().transformers or "")
    (_FOLDER / "model_sizes.toml").write_text(sizes, encoding="utf-8")


if __name__ == "__main__":
    write_catalog()
