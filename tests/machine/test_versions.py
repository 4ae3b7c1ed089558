"""probe_versions against a folder of made-up packages, and that it imports none."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import zerofit
from zerofit.core.facts import Versions
from zerofit.machine.versions import probe_versions


def _install(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_versions_are_those_of_the_metadata_and_none_where_not_installed(tmp_path: Path) -> None:
    _install(tmp_path, "torch", "2.13.0+cpu")
    _install(tmp_path, "deepspeed", "0.19.8")
    assert probe_versions(search_path=[str(tmp_path)]) == Versions(
        python=platform.python_version(), zerofit=zerofit.__version__, torch="2.13.0+cpu", deepspeed="0.19.8"
    )


def test_the_first_folder_of_the_search_path_wins(tmp_path: Path) -> None:
    _install(tmp_path / "first", "torch", "2.9.0")
    _install(tmp_path / "second", "torch", "2.8.0")
    assert probe_versions(search_path=[str(tmp_path / "first"), str(tmp_path / "second")]).torch == "2.9.0"


def test_this_environment_has_all_packages_and_none_is_imported() -> None:
    program = (
        "import sys; from zerofit.machine.versions import probe_versions; versions = probe_versions();"
        "names = ('torch', 'accelerate', 'deepspeed', 'transformers', 'peft', 'bitsandbytes');"
        "print([name for name in names if getattr(versions, name) is None],"
        "      [name for name in names if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[] []\n"
