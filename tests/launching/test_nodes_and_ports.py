"""Ports, and the recipes of launch/ run for real: two nodes stand side by side on the loopback address."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, RUN_TIMEOUT_S, SCRIPTS, Launch, environment, run_process

from zerofit.machine.port import free_port

SHARDS = str(SCRIPTS / "shards.py")


def shards_read(folder: Path) -> list[int]:
    return sorted(
        sample for rank in (0, 1) for sample in json.loads((folder / f"read{rank}of2.json").read_text())
    )


@pytest.mark.slow
def test_a_taken_port_is_no_failure(launch: Launch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = launch("--num-processes", "2", "--main-process-port", port, SHARDS, "accelerate").check()
    assert f"--main_process_port {port} " not in (run.run_folder / "command.sh").read_text()
    assert shards_read(run.folder) == list(range(32))


@pytest.mark.evidence
def test_the_recipe_for_one_node_runs(tmp_path: Path) -> None:
    recipe = str(ROOT / "launch" / "single_node.sh")
    run = run_process(
        [recipe, "--cpu", "--num-processes", "2", SHARDS, "trainer"], tmp_path, PRESET="z3"
    ).check()
    assert shards_read(run.folder) == list(range(32))
    assert "strategy: DeepSpeed ZeRO-3" in run.stderr


@pytest.mark.slow
def test_the_recipe_for_several_nodes_runs(tmp_path: Path) -> None:
    port = str(free_port(0))
    nodes = []
    for rank in ("0", "1"):
        settings = {"NUM_NODES": "2", "NODE_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        nodes.append(
            subprocess.Popen(
                [str(ROOT / "launch" / "multi_node.sh"), "--cpu", SHARDS, "accelerate"],
                cwd=tmp_path,
                env=environment(RANKS_PER_NODE="1", GLOO_SOCKET_IFNAME="lo", **settings),
                stdout=sys.stdout,
                stderr=subprocess.STDOUT,
            )
        )
    assert [node.wait(timeout=RUN_TIMEOUT_S) for node in nodes] == [0, 0]
    assert shards_read(tmp_path) == list(range(32))
    ranks = [
        json.loads((folder / "run.json").read_text())["ranks"][0]["rank"]
        for folder in (tmp_path / "zerofit-runs").glob("2*")
    ]
    assert sorted(ranks) == [0, 1]
