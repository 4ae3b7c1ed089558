"""num_processes in quotes: accelerate fails where it calculates with it, and hands it on elsewhere."""

from __future__ import annotations

import pytest
from rule_examples.example import Example
from rule_situations import situation_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules import ALL_RULES

_NODES = "num_machines: 2\nmachine_rank: 0\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
_STANDARD = "deepspeed_config:\n  deepspeed_multinode_launcher: standard\n"
_FILTER = "deepspeed_config:\n  deepspeed_hostfile: hosts\n  deepspeed_inclusion_filter: a@b\n"
_CASES = (
    (f"distributed_type: DEEPSPEED\n{_NODES}{_STANDARD}", "", "num_machines=2"),
    (f"distributed_type: DEEPSPEED\n{_NODES}", "", "num_machines=2"),
    (f"distributed_type: MULTI_GPU\n{_NODES}", "", "num_machines=2"),
    (f"distributed_type: FSDP\n{_NODES}", "", "num_machines=2"),
    (f"distributed_type: MEGATRON_LM\n{_NODES}", "", "num_machines=2"),
    ("distributed_type: MULTI_GPU\n", "--num_machines 4", "--num_machines 4"),
    ("distributed_type: 'NO'\nnum_machines: 1\n", "", "distributed_type='NO'"),
    ("distributed_type: NO\nnum_machines: 1\n", "", "distributed_type=NO"),
    ("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_machines: 1\n", "", "use_cpu=true"),
    ("distributed_type: MULTI_GPU\nnum_machines: 1\n", "--cpu", "--cpu"),
    ("distributed_type: 'NO'\nnum_machines: 2\n", "--use_deepspeed --zero_stage 2", "num_machines=2"),
    ("distributed_type: MULTI_GPU\nnum_machines: 1\n", "", None),
    ("distributed_type: DEEPSPEED\nnum_machines: 1\n", "", None),
    ("distributed_type: FSDP\nnum_machines: 1\n", "", None),
    ("distributed_type: 'NO'\nnum_machines: 1\n", "--multi_gpu", None),
    (f"distributed_type: DEEPSPEED\n{_NODES}{_FILTER}", "", None),
    (f"distributed_type: MULTI_GPU\n{_NODES}", "--num_processes 4", None),  # a flag's text is converted
    (f"distributed_type: DEEPSPEED\n{_NODES}", "--num_machines 1", None),
)


@pytest.mark.parametrize(("text", "flags", "reason"), _CASES)
def test_quotes_are_a_finding_where_accelerate_calculates(text: str, flags: str, reason: str | None) -> None:
    file = f"compute_environment: LOCAL_MACHINE\nnum_processes: '4'\n{text}"
    example = Example(accelerate=file, command=f"accelerate launch --config_file accelerate.yaml {flags}")
    rules = [rule for rule in ALL_RULES if rule.id == "num-processes-is-text"]
    found = [finding.found for finding in check(situation_of_example(example), rules=rules).findings]
    assert found == ([] if reason is None else [f'num_processes="4" with {reason}'])
