"""Several machines: who starts the ranks there, and how many."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zerofit.checking.engine import Finding

Check = Callable[..., list[Finding]]

_FILE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_machines": 2,
    "num_processes": 8,
}


def test_a_missing_hostfile_is_said_whole(check_example: Check) -> None:
    (finding,) = check_example("multinode-needs-hostfile", accelerate=_FILE)
    assert finding.as_text() == (
        "error[multinode-needs-hostfile]: without a hostfile DeepSpeed's launcher runs on this machine "
        "alone\n"
        "  found: num_machines=2 with no deepspeed_multinode_launcher and no deepspeed_hostfile"
        "   (accelerate.yaml:3)\n"
        "  why:   accelerate gives it `--hostfile None`, and it goes on with this machine after one line of "
        "log\n"
        "  fix:   set deepspeed_multinode_launcher to standard and start the command on every machine, or "
        "name a deepspeed_hostfile\n"
        "  see:   https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/launch.py"
    )


_COMMANDS = [
    ("multinode-needs-hostfile", "--deepspeed_multinode_launcher standard", []),
    ("multinode-needs-hostfile", "--num_machines 1", []),
    ("multinode-needs-hostfile", "--num_machines $NODES", []),
    ("multinode-needs-hostfile", "--use_fsdp", []),
    (
        "multinode-needs-hostfile",
        "--deepspeed_multinode_launcher slurm",
        ["num_machines=2 with --deepspeed_multinode_launcher slurm and no deepspeed_hostfile"],
    ),
    (
        "multinode-writes-environment",
        "--deepspeed_hostfile hosts",
        ["num_machines=2 with --deepspeed_hostfile hosts"],
    ),
    ("multinode-writes-environment", "", []),
    ("num-processes-is-for-all-machines", "--num_processes 3", ["--num_processes 3 with num_machines=2"]),
    ("num-processes-is-for-all-machines", "--num_processes 1", ["--num_processes 1 with num_machines=2"]),
    ("num-processes-is-for-all-machines", "--num_processes $N", []),
    ("gpu-ids-too-few", "--num_machines 1 --gpu_ids 0,1", ["num_processes=8 with --gpu_ids 0,1"]),
    ("gpu-ids-too-few", "--num_machines 1 --gpu_ids all", []),
    ("gpu-ids-too-few", "--num_machines 1 --gpu_ids $IDS", []),
    ("gpu-ids-too-few", "--num_machines 1 --gpu_ids 0,1 --num_processes 2", []),
    ("gpu-ids-too-few", "--num_machines 1 --gpu_ids 0,1 --num_processes $N", []),
    ("gpu-ids-too-few", "--num_machines 1 --gpu_ids 0,1 --cpu", []),
    ("gpu-ids-too-few", "--gpu_ids 0,1", []),  # of which machine?
]


@pytest.mark.parametrize(("rule", "flags", "found"), _COMMANDS)
def test_flags_and_file_together(check_example: Check, rule: str, flags: str, found: list[str]) -> None:
    command = f"accelerate launch --config_file accelerate.yaml {flags}"
    findings = check_example(rule, accelerate=_FILE, command=command)
    assert [finding.found for finding in findings] == found
