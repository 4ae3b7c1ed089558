"""ds_configs/ and the recipes of launch/ hold what is rendered, byte for byte and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.write_presets import preset_files
from tools.write_recipes import recipe_files
from zerofit.core.presets import PRESETS
from zerofit.core.strategy import Engine

_ROOT = Path(__file__).parents[1]
_SHELL_SCRIPTS = ["launch/single_node.sh", "launch/multi_node.sh", "launch/slurm.sbatch"]


def test_shipped_files_are_fresh() -> None:
    rendered = preset_files() | recipe_files()
    stale = [name for name, text in rendered.items() if (_ROOT / name).read_bytes() != text.encode()]
    assert stale == [], "make presets renders them anew"


def test_nothing_else_is_shipped() -> None:
    on_disk = {str(path.relative_to(_ROOT)) for path in (_ROOT / "ds_configs").rglob("*") if path.is_file()}
    assert on_disk == set(preset_files())
    recipes = {f"launch/{path.name}" for path in (_ROOT / "launch").iterdir()}
    assert recipes == {"launch/single_node.sh", "launch/multi_node.sh", *recipe_files()}


def test_every_preset_ships_its_files_and_a_row() -> None:
    readme = preset_files()["ds_configs/README.md"]
    for preset in PRESETS:
        has_file = f"ds_configs/{preset.deepspeed_file}" in preset_files()
        assert has_file is (preset.strategy.engine is Engine.DEEPSPEED)
        assert f"ds_configs/{preset.accelerate_file}" in preset_files()
        assert readme.count(f"| `{preset.name}` |") == 1


def test_shell_scripts_parse_and_are_executable() -> None:
    checked = [
        subprocess.run(["bash", "-n", name], cwd=_ROOT, capture_output=True, text=True)
        for name in _SHELL_SCRIPTS
    ]
    assert [(done.returncode, done.stderr) for done in checked] == [(0, "")] * len(_SHELL_SCRIPTS)
    assert [name for name in _SHELL_SCRIPTS if not (_ROOT / name).stat().st_mode & 0o111] == []
