"""Measure this machine's rates: start the program that does it, and make Rates of what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.rates import Basis, Calibration, Rate, RateName, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.facts import Machine

PROGRAM = (sys.executable, "-P", str(Path(__file__).with_name("calibrate_program.py")))
"""-P keeps the program's folder off sys.path, where modules of ours would hide others of the same name."""
_TIMEOUT_S = 120
"""ASSUMPTION: twice what it is meant to take; what was measured until then is kept."""


def calibrate(
    machine: Machine,
    *,
    has_cpu_adam: bool,
    nvme_path: str | None = None,
    short: bool = False,
    environ: Mapping[str, str] = os.environ,
    program: tuple[str, ...] = PROGRAM,
    timeout_s: float = _TIMEOUT_S,
) -> Calibration:
    """Measure what the GPUs, links, host memory, CPU Adam, collectives and disk of this machine achieve.

    It runs in processes of its own, as CUDA, once started, can't be undone, and takes less than a minute.

    Args:
        machine: this machine; its GPUs are those that are measured.
        has_cpu_adam: whether DeepSpeed's op is built; where it is not, torch's fused AdamW is timed for the
            reader and kept as no rate.
        nvme_path: a folder on the disk that would take what is offloaded; None measures no disk.
        short: whether small sizes do, for a test of the program.
        environ: the environment of the program.
        program: the program that measures.
        timeout_s: after this many seconds it is ended.
    """
    orders = {
        "num_gpus": len(machine.gpus),
        "has_fast_links": bool(machine.gpus) and all(gpu.has_fast_links for gpu in machine.gpus),
        "has_cpu_adam": has_cpu_adam,
        "nvme_path": nvme_path,
        "short": short,
    }
    process = subprocess.Popen(
        (*program, json.dumps(orders)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env={**environ, "DS_ACCELERATOR": "cuda" if machine.gpus else "cpu"},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
        ended = ""
    except subprocess.TimeoutExpired:
        _end(process)
        output, errors = process.communicate()
        ended = f"the rest: it did not end within {timeout_s:g} s"
    finally:
        # Ctrl-C does not reach a session of its own.
        if process.returncode is None:
            _end(process)
            process.wait()
    if not ended and process.returncode != 0:
        last_line = (errors.strip().splitlines() or ["no message"])[-1]
        ended = f"the rest: the program ended with {process.returncode}: {last_line}"
    lines = [json.loads(line) for line in output.splitlines()]
    return Calibration(
        rates=tuple(_rate(line["measured"]) for line in lines if "measured" in line),
        left_out=(
            *(line["left_out"] for line in lines if "left_out" in line),
            *((ended,) if ended else ()),
        ),
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End the program and the ranks of its all-reduce."""
    os.killpg(process.pid, signal.SIGKILL)


def _rate(plain: dict[str, Any]) -> Rate:
    return Rate(
        name=RateName(plain["name"]),
        value=plain["value"],
        unit=Unit(plain["unit"]),
        basis=Basis.MEASURED,
        source=plain["how"],
    )
