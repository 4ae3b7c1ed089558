"""Measures how long a user waits for a plan: with nothing kept, again, with another batch, by closed forms.

Each command is a process of its own, and begins with an empty cache but where an earlier one of its group has
filled it. Beside the wall time stand the time of one core that it and its forks took, and the time until the
first line of its answer. What the imports alone take, torch's and transformers', is measured apart, by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from circumstances import circumstances

REPOSITORY = Path(__file__).resolve().parent.parent
_SCRIPT = str(REPOSITORY / "examples" / "train_trainer.py")
_CARD = ("--model", "llama-3.2-1b", "--gpus", "1xRTX4090", "--seq-len", "2048", "--global-batch-size", "8")
_NODE = ("--model", "llama-3-8b", "--gpus", "8xA100-80G", "--seq-len", "2048")
_IMPORTED = "torch, transformers.modeling_utils, torch._subclasses.fake_tensor, torch.distributed.tensor"
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "llama-3-8b on 8 GPUs": {
        "cold": (*_NODE, "--global-batch-size", "64"),
        "again": (*_NODE, "--global-batch-size", "64"),
        "another batch": (*_NODE, "--global-batch-size", "128"),
        "another length": (*_NODE[:-1], "4096", "--global-batch-size", "64"),
        "--fast": ("--fast", *_NODE, "--global-batch-size", "64"),
    },
    "llama-3.2-1b on one GPU": {
        "cold": _CARD,
        "again": _CARD,
    },
    "a captured script": {
        "cold": ("--gpus", "1xRTX4090", _SCRIPT),
        "again": ("--gpus", "1xRTX4090", _SCRIPT),
    },
}
"""Arguments of `zerofit plan`; those of a group share a cache, in this order."""


def timed(command: list[str], cache: Path) -> dict[str, float]:
    """Return the seconds that a command takes: in all, of cores, and until its first line.

    Raises:
        SystemExit: the command failed.
    """
    here = {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    environment = {**os.environ, **here}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, env=environment, cwd=cache, text=True
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        first_s = time.perf_counter() - started
        process.stdout.read()
        code = process.wait()
        wall_s = time.perf_counter() - started
        if code not in (0, 1):  # 1: an answer, that nothing fits
            said.seek(0)
            print(said.read(), file=sys.stderr)
            raise SystemExit(f"start_times: {' '.join(command)} ended with {code}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall_s, "cores_s": cores_s, "first_line_s": first_s}


def measure(groups: dict[str, dict[str, tuple[str, ...]]], *, rounds: int) -> dict[str, Any]:
    """Return the times of each command and of the imports, by group: the medians of some rounds."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {"imports alone": {"": []}}
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="start-times-") as folder:
            imports = timed([sys.executable, "-P", "-c", f"import {_IMPORTED}; print()"], Path(folder))
            found["imports alone"][""].append(imports)
        for group, commands in groups.items():
            with tempfile.TemporaryDirectory(prefix="start-times-") as folder:
                for name, arguments in commands.items():
                    print(f"round {number + 1} of {rounds}: {group}, {name}", file=sys.stderr)
                    command = [sys.executable, "-P", "-m", "zerofit", "plan", *arguments]
                    found.setdefault(group, {}).setdefault(name, []).append(timed(command, Path(folder)))
    return {
        group: {
            name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
            for name, runs in commands.items()
        }
        for group, commands in found.items()
    }


def table(times: dict[str, Any]) -> str:
    """Return the times as lines of text."""
    lines = [f"{'':<42}{'wall':>9}{'cores':>9}{'first line':>12}"]
    for group, commands in times.items():
        for name, run in commands.items():
            seconds = f"{run['wall_s']:>7.1f} s{run['cores_s']:>7.1f} s{run['first_line_s']:>10.1f} s"
            lines.append(f"{', '.join(filter(None, (group, name))):<42}{seconds}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and write the result where --out says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="default: 1, two minutes")
    parser.add_argument("--only", choices=tuple(GROUPS), help="one group")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there, as JSON")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: one at least")
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out: there is no folder {options.out.parent}")
    groups = {name: GROUPS[name] for name in GROUPS if options.only in (None, name)}
    times = measure(groups, rounds=options.rounds)
    print(table(times))
    if options.out:
        result = {"times": times, **circumstances("torch", "transformers")}
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
