"""ds_configs/ holds what presets.py renders, byte for byte and nothing else; launch/ holds sound recipes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tools.write_presets import preset_files
from zerofit.core.presets import PRESETS

_ROOT = Path(__file__).parents[1]
_SHELL_SCRIPTS = ["launch/single_node.sh", "launch/multi_node.sh", "launch/slurm.sbatch"]


@pytest.mark.parametrize("name", preset_files())
def test_shipped_file_is_fresh(name: str) -> None:
    assert (_ROOT / name).read_bytes() == preset_files()[name].encode(), "make presets renders it anew"


def test_nothing_else_is_shipped() -> None:
    on_disk = {str(path.relative_to(_ROOT)) for path in (_ROOT / "ds_configs").rglob("*") if path.is_file()}
    assert on_disk == set(preset_files())


def test_every_preset_ships_both_files_and_a_row() -> None:
    readme = preset_files()["ds_configs/README.md"]
    for preset in PRESETS:
        assert f"ds_configs/{preset.deepspeed_file}" in preset_files()
        assert f"ds_configs/{preset.accelerate_file}" in preset_files()
        assert readme.count(f"| `{preset.name}` |") == 1


@pytest.mark.parametrize("name", _SHELL_SCRIPTS)
def test_shell_script_parses_and_is_executable(name: str) -> None:
    checked = subprocess.run(["bash", "-n", name], cwd=_ROOT, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert (_ROOT / name).stat().st_mode & 0o111


def test_kubernetes_recipe_is_a_service_and_an_indexed_job() -> None:
    service, job = yaml.safe_load_all((_ROOT / "launch/kubernetes.yaml").read_text())
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert (job["kind"], job["spec"]["completionMode"]) == ("Job", "Indexed")
    # The pods find pod 0 by the service's name, and the service finds the pods by the job's.
    pod = job["spec"]["template"]["spec"]
    name = service["metadata"]["name"]
    assert pod["subdomain"] == name
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    command = pod["containers"][0]["command"]
    assert command[command.index("--main-process-ip") + 1] == f"{job['metadata']['name']}-0.{name}"
    assert all(isinstance(word, str) for word in command)
