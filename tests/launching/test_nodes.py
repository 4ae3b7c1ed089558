"""Which nodes a run has, which one this is, and where its ranks meet."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from zerofit.configs.write.command import Rendezvous
from zerofit.core.errors import UserError
from zerofit.core.plan import Topology
from zerofit.launching.nodes import find_rendezvous
from zerofit.planning.sources.nodes import Nodes, with_hostfile

_HOST = socket.gethostname()
_TWO_NODES = Topology(num_nodes=2, world_size=4)


@pytest.mark.parametrize(
    ("nodes", "world_size"),
    [
        (Nodes(), None),
        (Nodes(num_processes=4), 4),
        (Nodes(ranks_per_node=2), 2),
        (Nodes(ranks_per_node=2, num_nodes=3), 6),
        (Nodes(ranks_per_node=2, num_nodes=3, num_processes=6), 6),
    ],
)
def test_world_size_from_any_flags(nodes: Nodes, world_size: int | None) -> None:
    assert nodes.world_size == world_size


def test_two_flags_for_the_number_of_ranks_must_agree() -> None:
    with pytest.raises(UserError) as error:
        _ = Nodes(ranks_per_node=2, num_nodes=3, num_processes=4).world_size
    assert error.value.found == "--num-processes 4 and --nproc-per-node 2 on 3 nodes"


@pytest.mark.parametrize(
    ("gpu_ids", "indices"), [(None, None), ("all", None), ("0", (0,)), ("0,2", (0, 2)), ("3, 1", (3, 1))]
)
def test_gpu_indices(gpu_ids: str | None, indices: tuple[int, ...] | None) -> None:
    assert Nodes(gpu_ids=gpu_ids).gpu_indices == indices


@pytest.mark.parametrize("gpu_ids", ["", "a", "0,", "0;1", "0-3", "1.5"])
def test_invalid_gpu_ids_are_refused(gpu_ids: str) -> None:
    with pytest.raises(UserError) as error:
        _ = Nodes(gpu_ids=gpu_ids).gpu_indices
    assert (error.value.rule, error.value.found) == ("bad-gpu-ids", f"--gpu-ids {gpu_ids}")


def _hostfile(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "flags", "nodes"),
    [
        (
            f"{_HOST} slots=4\nnode1 slots=4\n",
            Nodes(),
            Nodes(num_nodes=2, ranks_per_node=4, machine_rank=0, main_process_ip=_HOST),
        ),
        (
            f"# the cluster\n\n  node0   slots = 4  # first\n{_HOST} slots=4\n",
            Nodes(),
            Nodes(num_nodes=2, ranks_per_node=4, machine_rank=1, main_process_ip="node0"),
        ),
        (
            "10.0.0.1 slots=8\n10.0.0.2 slots=8\n",
            Nodes(machine_rank=1, main_process_port=1234),
            Nodes(
                num_nodes=2,
                ranks_per_node=8,
                machine_rank=1,
                main_process_ip="10.0.0.1",
                main_process_port=1234,
            ),
        ),
        (
            "fe80::1 slots=8\nnode-1.example.org slots=8\n",
            Nodes(machine_rank=0, main_process_ip="fast0", ranks_per_node=2),
            Nodes(num_nodes=2, ranks_per_node=2, machine_rank=0, main_process_ip="fast0"),
        ),
        (
            "localhost slots=2\n",
            Nodes(),
            Nodes(num_nodes=1, ranks_per_node=2, machine_rank=0, main_process_ip="localhost"),
        ),
    ],
)
def test_flags_win_over_the_hostfile(tmp_path: Path, text: str, flags: Nodes, nodes: Nodes) -> None:
    assert with_hostfile(flags, _hostfile(tmp_path, text)) == nodes


@pytest.mark.parametrize(
    "line",
    [
        "-oProxyCommand=reboot slots=2",
        "--help slots=2",
        "node;reboot slots=2",
        "$(reboot) slots=2",
        "`reboot` slots=2",
        "user@node slots=2",
        "node/.. slots=2",
        "node|x slots=2",
        "nöde slots=2",
        "node0",
        "node0 slots=",
        "node0 slots=-1",
        "node0 slots=0",
        "node0 slots=two",
        f"node0 slots={'9' * 5000}",
        "node0 slots=2 max_slots=4",
        "slots=2",
        "node0:2",
    ],
)
def test_an_invalid_hostfile_line_is_refused(tmp_path: Path, line: str) -> None:
    path = _hostfile(tmp_path, f"# nodes\n{line}\n")
    with pytest.raises(UserError) as error:
        with_hostfile(Nodes(machine_rank=0), path)
    assert (error.value.rule, error.value.found) == ("bad-hostfile", f"line 2: {line}   ({path})")


def test_a_duplicate_node_is_refused(tmp_path: Path) -> None:
    path = _hostfile(tmp_path, "node0 slots=2\nnode1 slots=2\nnode0 slots=2\n")
    with pytest.raises(UserError) as error:
        with_hostfile(Nodes(machine_rank=0), path)
    assert error.value.found == f"line 3: node0 slots=2   ({path})"


def test_on_one_node_a_taken_port_is_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        found = find_rendezvous(Nodes(main_process_port=taken, gpu_ids="0,1"), Topology(world_size=2))
    assert found == Rendezvous(main_process_port=found.main_process_port, gpu_ids="0,1")
    assert found.main_process_port not in (0, taken)


def test_on_one_node_port_0_asks_for_a_free_one() -> None:
    assert find_rendezvous(Nodes(main_process_port=0), Topology()).main_process_port != 0


def test_on_one_node_a_free_port_is_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert find_rendezvous(Nodes(main_process_port=port), Topology()).main_process_port == port


def test_on_several_nodes_the_ranks_meet_where_the_flags_say() -> None:
    nodes = Nodes(machine_rank=1, main_process_ip="node0", main_process_port=1234, gpu_ids="0")
    assert find_rendezvous(nodes, _TWO_NODES) == Rendezvous(
        machine_rank=1, main_process_ip="node0", main_process_port=1234, gpu_ids="0"
    )


def test_on_several_nodes_the_port_is_tried_on_the_first_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        second = Nodes(machine_rank=1, main_process_ip="node0", main_process_port=port)
        assert find_rendezvous(second, _TWO_NODES).main_process_port == port
        with pytest.raises(UserError) as error:
            find_rendezvous(
                Nodes(machine_rank=0, main_process_ip="node0", main_process_port=port), _TWO_NODES
            )
    assert error.value.found == f"--main-process-port {port}"


_TWO = {"num_nodes": 2}
_AT_NODE_0 = {"main_process_ip": "node0"}


@pytest.mark.parametrize(
    ("said", "num_nodes", "rule", "found"),
    [
        ({}, 4, "node-unknown", "a plan for 4 nodes without --machine-rank and --main-process-ip"),
        (_TWO, 2, "node-unknown", "--num-machines 2 without --machine-rank and --main-process-ip"),
        (_TWO | {"machine_rank": 0}, 2, "node-unknown", "--num-machines 2 without --main-process-ip"),
        (_TWO | _AT_NODE_0, 2, "node-unknown", "--num-machines 2 without --machine-rank"),
        (
            _AT_NODE_0 | {"machine_rank": 2},
            2,
            "node-out-of-range",
            "--machine-rank 2 with a plan for 2 nodes",
        ),
        ({**_AT_NODE_0, "machine_rank": 0, "main_process_port": 0}, 2, "port-taken", "--main-process-port 0"),
        ({**_AT_NODE_0, "machine_rank": 1, "main_process_port": 0}, 2, "port-taken", "--main-process-port 0"),
        ({"machine_rank": 1}, 1, "node-out-of-range", "--machine-rank 1 with one node"),
    ],
)
def test_settings_that_each_node_needs(said: dict[str, Any], num_nodes: int, rule: str, found: str) -> None:
    with pytest.raises(UserError) as error:
        find_rendezvous(Nodes(**said), Topology(num_nodes=num_nodes, world_size=2 * num_nodes))
    assert (error.value.rule, error.value.found) == (rule, found)
