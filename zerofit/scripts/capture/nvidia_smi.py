"""Replaces nvidia-smi for a captured script, and reports the planned GPUs.

It is run as a file, with FOLDER and nvidia-smi's arguments, for a fast start; FOLDER contains spec.json, and
receives a file that records the call.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ASKED = "asked-nvidia-smi"
"""Exists in the capture's folder once the script has called it."""


def install(folder: Path) -> Path:
    """Write a program nvidia-smi into a folder of the capture, and return that folder, for PATH."""
    place = folder / "bin"
    place.mkdir(exist_ok=True)
    program = place / "nvidia-smi"
    command = f'exec "{sys.executable}" -P -S "{__file__}" "{folder}" "$@"'
    program.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
    program.chmod(0o755)
    return place


def answer(arguments: list[str], gpus: list[dict[str, Any]]) -> str:
    """Return nvidia-smi's output for these GPUs: -L, --query-gpu=... --format=csv..., or a list."""
    options = dict(word.partition("=")[::2] for word in arguments)
    names = next((options[name] for name in ("--query-gpu", "--query_gpu") if name in options), None)
    if names is None:
        return "".join(f"GPU {place}: {gpu['name']} (UUID: GPU-{place})\n" for place, gpu in enumerate(gpus))
    columns = [name.strip() for name in names.split(",")]
    rows = [", ".join(_value(name, place, gpus, options) for name in columns) for place in range(len(gpus))]
    header = [] if "noheader" in options.get("--format", "") else [", ".join(columns)]
    return "".join(f"{row}\n" for row in (*header, *rows))


def _value(name: str, place: int, gpus: list[dict[str, Any]], options: dict[str, str]) -> str:
    gpu = gpus[place]
    mebibytes = gpu["memory_bytes"] >> 20
    unit = "" if "nounits" in options.get("--format", "") else " MiB"
    values = {
        "index": str(place),
        "count": str(len(gpus)),
        "name": str(gpu["name"]),
        "gpu_name": str(gpu["name"]),
        "uuid": f"GPU-{place}",
        "memory.total": f"{mebibytes}{unit}",
        "memory.free": f"{mebibytes}{unit}",
        "memory.used": f"0{unit}",
        "compute_cap": ".".join(map(str, gpu["compute_capability"] or (8, 0))),
    }
    return values.get(name, "0" if name.startswith("utilization") else "[N/A]")


if __name__ == "__main__":
    own = Path(sys.argv[1])
    (own / ASKED).touch()
    sys.stdout.write(answer(sys.argv[2:], json.loads((own / "spec.json").read_text("utf-8"))["gpus"]))
