"""The plan of a Strategy that a script brings itself, for the ranks that there are."""

from __future__ import annotations

import os

from zerofit.compat import ALL_RULES
from zerofit.compat.engine import check
from zerofit.compat.rule import Severity
from zerofit.layers.of_strategy import situation_of_strategy
from zerofit.plan import Plan, Topology
from zerofit.probe.machine import probe_machine
from zerofit.probe.versions import probe_versions
from zerofit.strategy import Strategy


def plan_of_strategy(strategy: Strategy) -> Plan:
    """Return a plan that runs a strategy on the ranks and the machine that this process is part of.

    The ranks are those of the launcher's WORLD_SIZE, on the CPU where torch sees no GPU or accelerate was
    told to leave it alone.

    Raises:
        UserError: a rule says that the strategy can't work.
    """
    import torch

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    plan = Plan(
        strategy=strategy,
        topology=Topology(
            num_nodes=max(1, world_size // ranks_per_node),
            world_size=world_size,
            on_cpu=wants_cpu or not torch.cuda.is_available(),
        ),
        machine=probe_machine(may_be_unreadable=True),
        versions=probe_versions(),
    )
    situation = situation_of_strategy(strategy, topology=plan.topology, versions=plan.versions)
    for finding in check(situation, rules=ALL_RULES).of(Severity.ERROR):
        raise finding.as_error()
    return plan
