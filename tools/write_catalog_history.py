"""python -m tools.write_catalog_history: reads zerofit/catalog/*.json anew off every supported release.

Each release is installed by pip, without what it asks for, into a folder of its own that goes before the
installed libraries; nothing of the environment changes. It needs a network and many minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.schemas.new_release import with_release
from tools.schemas.render import render_schema
from tools.write_catalog import FOLDER, PROBES
from zerofit.configs.schema import Schema
from zerofit.configs.schemas.catalog import schema_of
from zerofit.core.supported import SUPPORTED, release_of

_FILES = {
    "transformers": ("training_arguments",),
    "accelerate": ("accelerate", "accelerate_launch"),
    "deepspeed": ("deepspeed",),
}
"""Files of the catalog by the package that reads them."""
_EVERY_PATCH = ("deepspeed",)
"""Packages whose patch releases bring keys, too; of others the first release of each minor one is read."""
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def releases_of(package: str, listed: str) -> list[str]:
    """Return the releases of a package to read, the oldest first.

    Args:
        package: its name.
        listed: what `pip index versions` prints.
    """
    found = re.search(r"Available versions: (.*)", listed)
    if found is None:
        raise ValueError(f"pip names no releases of {package}: {listed!r}")
    names = [name for name in found[1].split(", ") if re.fullmatch(r"[\d.]+", name)]
    chosen: dict[tuple[str, ...], str] = {}
    for name in sorted(filter(SUPPORTED[package].has, names), key=release_of):
        minor = tuple(name.split(".")[:2])
        chosen.setdefault((name,) if package in _EVERY_PATCH else minor, name)
    return list(chosen.values())


def write_history() -> None:
    """Write the schemas of all supported releases up to the installed ones."""
    for package, names in _FILES.items():
        histories = dict[str, Schema]()
        for schemas in _probed(package):
            for name, schema in zip(names, schemas, strict=True):
                known = histories.get(name)
                histories[name] = with_release(known, schema) if known else schema
        for name, history in histories.items():
            (FOLDER / f"{name}.json").write_text(render_schema(history), encoding="utf-8")


def _probed(package: str) -> Iterator[list[Schema]]:
    """Yield what each release says of the package's files, the installed one last."""
    listed = subprocess.run(
        [*_PIP, "index", "versions", package], capture_output=True, text=True, check=True
    ).stdout
    installed = [PROBES[name]() for name in _FILES[package]]
    with tempfile.TemporaryDirectory() as folder:
        companions = Path(folder) / "companions"
        for release in releases_of(package, listed):
            if release_of(release) >= release_of(installed[0].version):
                continue
            overlay = Path(folder) / "overlay"
            shutil.rmtree(overlay, ignore_errors=True)
            _install(f"{package}=={release}", overlay, "--no-deps")
            said = _said(package, overlay)
            if said is None and package == "transformers":
                # An old transformers wants an old huggingface_hub; it does not ask for torch.
                if not companions.exists():
                    _install(f"{package}=={release}", companions)
                said = _said(package, overlay, companions)
            if said is None:
                print(f"{package} {release}: can't be imported, and is left out", file=sys.stderr)
            else:
                print(f"{package} {release}", file=sys.stderr)
                yield said
    yield installed


def _install(requirement: str, folder: Path, *options: str) -> None:
    # DeepSpeed comes as source: its build asks the installed torch for its version, and may build no op.
    into = ("--no-build-isolation", "--no-compile", "--target", str(folder))
    command = [*_PIP, "install", "--quiet", *into, *options, requirement]
    subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, check=True)


def _said(package: str, *folders: Path) -> list[Schema] | None:
    """Return what the release in the first folder says; None where it can't be imported."""
    root = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (*folders, root))),
        "DS_ACCELERATOR": "cpu",
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tools.write_catalog", *_FILES[package]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    # DeepSpeed writes its log in front.
    texts = ran.stdout[max(ran.stdout.find("{"), 0) :].split("\0")
    return [schema_of(json.loads(text)) for text in texts] if ran.returncode == 0 else None


if __name__ == "__main__":
    write_history()
