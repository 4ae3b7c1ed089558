"""Nodes in network namespaces, each with the launcher of a submitted run: they train, and they fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from namespaces import NamespaceNodes, can_make_nodes
from planning_problems import spec_of

from zerofit.core.facts import GpuSpec
from zerofit.core.plan import plan_from_json, plan_to_json
from zerofit.core.rank_observation import read_observation
from zerofit.core.strategy import ZeroStage
from zerofit.launching.clusters.job import Job, code_digest, job_to_json
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import probe_versions
from zerofit.planning.plan_from_flags import choose

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not can_make_nodes(), reason="network namespaces need root and iproute2"),
]

_SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
_PORT = 29400
_JOIN_LIMIT_S = 40
_TOLD_WITHIN_S = 60
"""An error before the training names the node within a minute."""
_PARTED_WITHIN_S = 90
"""The nodes have met, and then try for 40 s to reach each other."""
_ENDED_WITHIN_S = 30
"""After a fault in the training the other nodes end within half a minute."""
_START_S = 150
_HAS_GPU = bool(probe_machine(may_be_unreadable=True).gpus)


@dataclass
class Cluster:
    """Some nodes and a run on them."""

    nodes: NamespaceNodes
    folder: Path
    processes: dict[int, subprocess.Popen[bytes]]

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def prepare(self, *, zero_stage: int = 2, steps: int = 5000, named: str = "run") -> Path:
        """Write the run folder as `zerofit submit` does, and return it."""
        num_nodes = self.nodes.num_nodes
        spec = spec_of(
            on_cpu=True, num_processes=num_nodes, num_nodes=num_nodes, zero_stage=ZeroStage(zero_stage)
        )
        plan = choose(machine=probe_machine(), versions=probe_versions(), spec=spec)
        plan = replace(plan, machine=replace(plan.machine, num_cpu_cores=1))
        folder = self.folder / named
        folder.mkdir()
        job = Job(
            run="run",
            target=(_SCRIPT, str(steps)),
            work_dir=str(self.folder),
            run_folder=str(folder),
            engine="slurm",
            num_nodes=num_nodes,
            code_digest=code_digest((_SCRIPT,)),
            max_requeues=0,
            join_limit_s=_JOIN_LIMIT_S,
        )
        (folder / "plan.json").write_text(plan_to_json(plan))
        (folder / "job.json").write_text(job_to_json(job))
        return folder

    def start(self, *of: int, address: str | None = None, folder: Path | None = None) -> None:
        """Start the launcher on some nodes."""
        for node in of:
            where = ("--node", str(node), "--address", address or self.nodes.name(0), "--port", str(_PORT))
            module = "zerofit.launching.clusters.node"
            command = [sys.executable, "-m", module, str(folder or self.run_folder), *where]
            self.processes[node] = self.nodes.start(node, command, self.folder, self.folder / f"out{node}")

    def wait_for_steps(self, steps: int) -> None:
        """Wait until every rank has done so many steps."""
        until = time.monotonic() + _START_S
        ranks = range(self.nodes.num_nodes)
        while True:
            found = [read_observation(self.run_folder / "ranks", rank) for rank in ranks]
            if all(one is not None and one.step >= steps for one in found):
                return
            assert time.monotonic() < until, "\n".join(self.said(node) for node in ranks)
            time.sleep(0.1)

    def end(self, *of: int, within_s: float) -> list[int]:
        """Return the exit codes of some nodes' launchers, which must end in time."""
        until = time.monotonic() + within_s
        codes = []
        for node in of:
            try:
                codes.append(self.processes[node].wait(timeout=max(0.1, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                pytest.fail(f"node {node} still runs after {within_s} s: {self.said(node)}")
        print(f"the launchers ended within {time.monotonic() - until + within_s:.1f} s")
        return codes

    def said(self, node: int) -> str:
        return (self.folder / f"out{node}").read_text()

    def name(self, node: int) -> str:
        return f"node {node} ({self.nodes.name(node)})"


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path, built_ops: None) -> Iterator[Cluster]:
    with NamespaceNodes(getattr(request, "param", 2)) as nodes:
        yield Cluster(nodes=nodes, folder=tmp_path, processes={})


@pytest.mark.parametrize(("cluster", "zero_stage"), [(2, 2), (4, 2), (4, 3)], indirect=["cluster"])
def test_nodes_train_though_each_ones_own_name_is_127_0_1_1(cluster: Cluster, zero_stage: int) -> None:
    cluster.prepare(zero_stage=zero_stage, steps=10)
    every = range(cluster.nodes.num_nodes)
    cluster.start(*every)
    assert cluster.end(*every, within_s=_START_S) == [0] * len(every), cluster.said(0)
    records = [json.loads((cluster.run_folder / f"ranks/rank{rank}.json").read_text()) for rank in every]
    assert [record["exit_code"] for record in records] == [0] * len(every)
    assert f"{cluster.name(0)}: {len(every)} nodes have met" in cluster.said(0)


@pytest.mark.parametrize("cluster", [3, 4], indirect=True)
def test_a_missing_peer_is_named_on_every_node(cluster: Cluster) -> None:
    cluster.prepare()
    *there, missing = range(cluster.nodes.num_nodes)
    cluster.start(*there)
    assert cluster.end(*there, within_s=_TOLD_WITHIN_S) == [1] * len(there)
    for node in there:
        assert f"error[node-missing]: node {missing} of {missing + 1} did not come" in cluster.said(node)
        assert "Traceback" not in cluster.said(node)


@pytest.mark.skipif(_HAS_GPU, reason="the nodes of this machine have GPUs")
def test_a_node_without_its_gpus_is_named_on_every_node(cluster: Cluster) -> None:
    folder = cluster.prepare()
    plan = plan_from_json((folder / "plan.json").read_text(), name="plan.json")
    gpu = GpuSpec(name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30)
    on_gpus = replace(plan.topology, on_cpu=False)
    plan = replace(plan, topology=on_gpus, machine=replace(plan.machine, gpus=(gpu,)))
    (folder / "plan.json").write_text(plan_to_json(plan))
    cluster.start(0, 1)
    assert cluster.end(0, 1, within_s=_TOLD_WITHIN_S) == [1, 1]
    for node in (0, 1):
        error = f"error[node-without-its-gpus]: {cluster.name(0)} lacks the GPUs of the plan"
        assert error in cluster.said(node)
        assert "no GPU; the plan is for 1 x NVIDIA H100 80GB HBM3" in cluster.said(node)


@pytest.mark.parametrize(
    ("cluster", "address"), [(2, "wrong"), (2, "no-such-host"), (4, "wrong")], indirect=["cluster"]
)
def test_a_wrong_address_is_named_on_every_node(cluster: Cluster, address: str) -> None:
    cluster.prepare()
    wrong = f"{cluster.nodes.subnet}.99" if address == "wrong" else address
    *right, last = range(cluster.nodes.num_nodes)
    cluster.start(*right)
    cluster.start(last, address=wrong)
    every = (*right, last)
    assert cluster.end(*every, within_s=_TOLD_WITHIN_S) == [1] * len(every)
    for node in right:
        assert f"error[node-missing]: node {last} of {len(every)} did not come" in cluster.said(node)
    assert "error[node-unreachable]: node 0 does not respond" in cluster.said(last)
    assert f"{cluster.name(last)} can't reach node 0 at {wrong}, port {_PORT}" in cluster.said(last)
    assert "frame #" not in cluster.said(last)


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_nodes_that_cant_reach_each_other_are_named_on_every_node(cluster: Cluster) -> None:
    cluster.prepare()
    cluster.nodes.part(1, 2)
    cluster.start(0, 1, 2)
    assert cluster.end(0, 1, 2, within_s=_PARTED_WITHIN_S) == [1, 1, 1]
    for node in range(3):
        said = cluster.said(node)
        assert "error[nodes-cannot-reduce]: the all-reduce between the nodes failed on" in said
        assert f"{cluster.name(0)}: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier" in said
        assert "frame #" not in said


def test_nodes_with_other_plans_are_told_apart(cluster: Cluster) -> None:
    cluster.prepare()
    other = cluster.prepare(zero_stage=3, named="other")
    cluster.start(0)
    cluster.start(1, folder=other)
    assert cluster.end(0, 1, within_s=_TOLD_WITHIN_S) == [1, 1]
    for node in (0, 1):
        assert "error[nodes-differ-in-plan]: the nodes differ in their plan" in cluster.said(node)
        assert cluster.name(1) in cluster.said(node)


@pytest.mark.parametrize(
    ("cluster", "zero_stage", "dead"),
    [(2, 2, 0), (2, 2, 1), (4, 2, 0), (4, 3, 2)],
    indirect=["cluster"],
)
def test_a_killed_node_is_named_and_the_others_end(cluster: Cluster, zero_stage: int, dead: int) -> None:
    cluster.prepare(zero_stage=zero_stage)
    every = range(cluster.nodes.num_nodes)
    cluster.start(*every)
    cluster.wait_for_steps(3)
    cluster.nodes.kill(dead)
    left = [node for node in every if node != dead]
    assert cluster.end(*left, within_s=_ENDED_WITHIN_S) == [75] * len(left), cluster.said(left[0])
    for node in left:
        assert f"{cluster.name(node)}: {cluster.name(dead)} was lost" in cluster.said(node)


@pytest.mark.parametrize("cluster", [2, 4], indirect=True)
def test_a_link_that_goes_down_is_noticed_on_both_sides(cluster: Cluster) -> None:
    cluster.prepare()
    *others, last = range(cluster.nodes.num_nodes)
    cluster.start(*others, last)
    cluster.wait_for_steps(3)
    cluster.nodes.cut(last)
    assert cluster.end(*others, last, within_s=_ENDED_WITHIN_S) == [75] * (len(others) + 1)
    for node in others:
        assert f"{cluster.name(last)} was lost" in cluster.said(node)
    assert f"{cluster.name(0)} was lost" in cluster.said(last)


@pytest.mark.parametrize("cluster", [2, 4], indirect=True)
def test_a_killed_worker_is_named_on_every_node(cluster: Cluster) -> None:
    cluster.prepare()
    every = range(cluster.nodes.num_nodes)
    cluster.start(*every)
    cluster.wait_for_steps(3)
    observed = read_observation(cluster.run_folder / "ranks", 1)
    assert observed is not None
    os.kill(observed.pid, signal.SIGKILL)
    assert cluster.end(*every, within_s=_ENDED_WITHIN_S) == [137] * len(every)
    for node in every:
        assert "rank 1 was killed by signal 9 (SIGKILL)" in cluster.said(node)
        assert f"on {cluster.name(1)}" in cluster.said(node)
