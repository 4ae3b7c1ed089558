"""Examples of the rules of zerofit/checking/rules/launch/machines.py."""

from __future__ import annotations

from typing import Any

from rule_examples.example import LAUNCH_FILE, ON_CPU, Example, Examples, config

_STANDARD = "standard"
_NODE_0 = {"machine_rank": 0, "main_process_ip": "10.0.0.1", "main_process_port": 29500}


def _file(*, num_machines: int = 2, num_processes: int | str = 2, **section: Any) -> dict[str, Any]:
    counts = {"num_machines": num_machines, "num_processes": num_processes}
    return {**LAUNCH_FILE, **counts, **_NODE_0, "deepspeed_config": {"zero_stage": 2, **section}}


EXAMPLES = {
    "num-processes-is-for-all-machines": Examples(
        bad=Example(accelerate=_file(num_processes=3, deepspeed_multinode_launcher=_STANDARD)),
        good=Example(accelerate=_file(num_processes=4, deepspeed_multinode_launcher=_STANDARD)),
    ),
    "num-processes-is-text": Examples(
        bad=Example(accelerate=_file(num_processes="2", deepspeed_multinode_launcher=_STANDARD)),
        good=Example(accelerate=_file(deepspeed_multinode_launcher=_STANDARD)),
    ),
    "multinode-needs-hostfile": Examples(
        bad=Example(accelerate=_file()),
        good=Example(accelerate=_file(deepspeed_multinode_launcher=_STANDARD)),
    ),
    "multinode-writes-environment": Examples(
        bad=Example(accelerate=_file(deepspeed_hostfile="hostfile")),
        good=Example(accelerate=_file(deepspeed_multinode_launcher=_STANDARD)),
    ),
    "cpu-ranks-need-zerofit-launch": Examples(
        bad=Example(deepspeed=config(2), command="accelerate launch", topology=ON_CPU),
        good=Example(deepspeed=config(2), command="zerofit launch", topology=ON_CPU),
    ),
}
