"""Examples of the rules of zerofit/checking/rules/launch/hostfiles.py."""

from __future__ import annotations

from rule_examples.example import Example, Examples

_HOSTS = "worker-0 slots=4\nworker-1 slots=4\n"
_SCRIPT = 'print("weights")\n'


def _on_hosts(flags: str, hostfile: str | None = _HOSTS) -> Example:
    return Example(command=f"deepspeed --hostfile hostfile {flags}", hostfile=hostfile, script=_SCRIPT)


EXAMPLES = {
    "hostfile-refused": Examples(
        bad=_on_hosts("", hostfile="worker-0 slots=4\nworker-1 4\n"),
        good=_on_hosts(""),
    ),
    "hostfile-lacks-slot": Examples(
        bad=_on_hosts("--include worker-0:2,4"),
        good=_on_hosts("--include worker-0:2,3@worker-1"),
    ),
    "hostfile-smaller-than-flags": Examples(
        bad=_on_hosts("--num_nodes 4"),
        good=_on_hosts("--num_nodes 2 --num_gpus 4"),
    ),
    "hostfile-missing": Examples(
        bad=_on_hosts("--num_nodes 2", hostfile=None),
        good=_on_hosts("--num_nodes 2"),
    ),
}
