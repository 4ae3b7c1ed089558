#!/usr/bin/env python3
"""Prints what a plan asks of a cluster: nodes, GPUs, cores, memory and time.

    sbatch $(python launch/resources.py plan.json) launch/slurm.sbatch --plan plan.json train.py ARGS
    python launch/resources.py plan.json --job launch/kubernetes.yaml | kubectl apply -f -

`zerofit plan --output plan.json` writes the plan. Cores are those of its machine, as --cpu-cores gives them;
memory is the estimate for a node's host, with its uncertainty.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from zerofit.core.plan import plan_from_json
from zerofit.core.units import GIB

if TYPE_CHECKING:
    from zerofit.core.plan import Plan

_START_S = 1800
"""ASSUMPTION: half an hour is enough for the start, the data and the checkpoints."""


def main() -> None:
    """Read the arguments and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path, help="a plan file")
    parser.add_argument(
        "--steps", type=int, help="optimizer steps of the run: a limit of time is made of them"
    )
    parser.add_argument("--job", type=Path, metavar="FILE", help="print this Kubernetes job with the numbers")
    flags = parser.parse_args()
    plan = plan_from_json(flags.plan.read_text(encoding="utf-8"), name=str(flags.plan))
    time_s = None if flags.steps is None else _time_s(plan, flags.steps)
    if flags.job is not None:
        print(_job(flags.job.read_text(encoding="utf-8"), plan, time_s), end="")
        return
    topology = plan.topology
    print(f"--nodes={topology.num_nodes} --gpus-per-node={topology.ranks_per_node}", end=" ")
    print(f"--cpus-per-task={plan.machine.num_cpu_cores} --mem={_memory_gib(plan)}G", end="")
    print("" if time_s is None else f" --time={math.ceil(time_s / 60)}")  # Slurm takes minutes


def _memory_gib(plan: Plan) -> int:
    """Return the host memory of a node; what the plan's machine has where it holds no estimate."""
    if plan.estimate is None:
        return plan.machine.host_memory_available_bytes // GIB
    host = plan.estimate.host
    return math.ceil(host.peak_bytes * (1 + host.uncertainty) / GIB)


def _time_s(plan: Plan, num_steps: int) -> int:
    step = plan.estimate.step_time if plan.estimate else None
    if step is None:
        raise SystemExit("resources.py: the plan holds no time of a step, so --steps makes no limit of time")
    return math.ceil(num_steps * step.seconds * (1 + step.uncertainty)) + _START_S


def _job(text: str, plan: Plan, time_s: int | None) -> str:
    """Return the documents of kubernetes.yaml with the plan's numbers."""
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    num_nodes = plan.topology.num_nodes
    for document in documents:
        if document["kind"] != "Job":
            continue
        spec = document["spec"]
        spec["completions"] = spec["parallelism"] = num_nodes
        if time_s is not None:
            spec["activeDeadlineSeconds"] = time_s
        (container,) = spec["template"]["spec"]["containers"]
        command = container["command"]
        command[command.index("--num-machines") + 1] = str(num_nodes)
        container["resources"] = {
            "requests": {"cpu": plan.machine.num_cpu_cores, "memory": f"{_memory_gib(plan)}Gi"},
            "limits": {"memory": f"{_memory_gib(plan)}Gi", "nvidia.com/gpu": plan.topology.ranks_per_node},
        }
    return yaml.safe_dump_all(documents, sort_keys=False)


if __name__ == "__main__":
    main()
