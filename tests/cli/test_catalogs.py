"""zerofit gpus, zerofit models: what --gpus and --model know by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zerofit.machine.gpu_catalog import load_gpus
from zerofit.machine.machine_spec import parse_gpus
from zerofit.models.catalog import catalog_models

if TYPE_CHECKING:
    from runs import RunZerofit


@pytest.mark.parametrize("width", ["50", "80", "200"])
@pytest.mark.parametrize(
    ("verb", "names"),
    [("gpus", [gpu.name for gpu in load_gpus()]), ("models", [*catalog_models()])],
)
def test_each_name_is_listed_whole_at_any_width(
    verb: str, names: list[str], width: str, run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    listed = run_zerofit(verb, cwd=tmp_path, environment={"COLUMNS": width})
    assert (listed.stderr, listed.returncode) == ("", 0)
    lines = listed.stdout.splitlines()
    assert max(map(len, lines)) <= int(width)
    assert [name for name in names if name not in "".join(listed.stdout.split())] == []


def test_json_has_the_facts_of_each(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    gpus = json.loads(run_zerofit("gpus", "--json", cwd=tmp_path).stdout)
    assert [gpu["name"] for gpu in gpus] == [gpu.name for gpu in load_gpus()]
    assert all(parse_gpus(f"2x{gpu['name']}")[0].usable_bytes == gpu["usable_bytes"] for gpu in gpus)
    models = {
        model["name"]: model for model in json.loads(run_zerofit("models", "--json", cwd=tmp_path).stdout)
    }
    assert models.keys() == catalog_models().keys()
    assert models["llama-3-8b"]["num_parameters"] == 8_030_261_248
    assert models["llama-3-8b"]["max_sequence_length"] == 8192
