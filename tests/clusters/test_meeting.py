"""Launchers that meet at a store of this machine: whom they miss, what they refuse, how they end together."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from zerofit.core.errors import UserError
from zerofit.launching.clusters.heartbeat import Heartbeat
from zerofit.launching.clusters.meeting import NodePlace, met
from zerofit.launching.diagnose import EndKind, RunEnd
from zerofit.machine.port import free_port

_HOST = socket.gethostname()


def _on_nodes(work: Callable[[NodePlace], object], *nodes: int, of: int, limit_s: float = 20) -> list[object]:
    """Return what some of a run's nodes return, or their errors."""
    port = free_port(0)

    def on_node(node: int) -> object:
        place = NodePlace(node=node, num_nodes=of, address="127.0.0.1", port=port, limit_s=limit_s)
        try:
            return work(place)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as threads:
        return list(threads.map(on_node, nodes))


def _error_of(work: Callable[[], object]) -> UserError:
    with pytest.raises(UserError) as error:
        work()
    return error.value


def _meet(place: NodePlace, run: str = "run") -> None:
    with met(place, run, {}):
        pass


def test_each_node_has_the_values_of_all() -> None:
    def work(place: NodePlace) -> object:
        with met(place, "run", {"gpus": place.node}) as meeting:
            facts = [facts["gpus"] for facts in meeting.facts]
            return facts, meeting.gather("clock", place.node * 2), meeting.from_node_0("port", lambda: 29500)

    assert _on_nodes(work, 0, 1, 2, of=3) == [([0, 1, 2], (0, 2, 4), 29500)] * 3


def test_a_single_node_meets_itself_on_no_port() -> None:
    place = NodePlace(node=0, num_nodes=1, address="127.0.0.1", port=1, limit_s=1)
    with met(place, "run", {}) as meeting:
        assert meeting.gather("clock", 3) == (3,)
        assert meeting.names == (f"node 0 ({_HOST})",)


def test_nodes_that_never_come_are_named_by_each_that_waits() -> None:
    errors = _on_nodes(_meet, 0, 2, of=4, limit_s=1)
    assert [(error.rule, error.summary) for error in errors if isinstance(error, UserError)] == [
        ("node-missing", "nodes 1, 3 of 4 did not come")
    ] * 2


def test_a_node_that_is_lost_after_the_meeting_is_named_by_each_other() -> None:
    def work(place: NodePlace) -> object:
        with met(place, "run", {}) as meeting:
            return None if place.node == 1 else meeting.gather("clock", 0, limit_s=1)

    first, second, third = _on_nodes(work, 0, 1, 2, of=3)
    assert second is None
    assert {(error.rule, error.summary) for error in (first, third) if isinstance(error, UserError)} == {
        ("node-lost", f"node 1 ({_HOST}) no longer responds")
    }


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port whose process accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        for connection in accepted:
            connection.close()


def test_a_silent_process_on_the_port_is_no_launcher(silent_port: int) -> None:
    place = NodePlace(node=1, num_nodes=2, address="127.0.0.1", port=silent_port, limit_s=6)
    error = _error_of(lambda: _meet(place))
    assert error.rule == "node-unreachable"
    assert error.found == (
        f"node 1 ({_HOST}) can't reach node 0 at 127.0.0.1, port {silent_port}: the process listening there "
        "is not a launcher (6 s)"
    )


def test_node_0_names_the_port_that_another_process_has(silent_port: int) -> None:
    place = NodePlace(node=0, num_nodes=2, address="127.0.0.1", port=silent_port, limit_s=1)
    error = _error_of(lambda: _meet(place))
    assert error.rule == "port-taken"
    assert error.found.startswith(f"port {silent_port} of node 0 ({_HOST}): ")
    assert "EADDRINUSE" in error.found
    assert "\n" not in error.found


def test_a_node_of_another_run_is_turned_away_and_disturbs_nobody() -> None:
    def work(place: NodePlace) -> object:
        if place.node < 2:
            _meet(place)
            return None
        return _error_of(lambda: _meet(replace(place, node=1), "other")).found

    *run, other = _on_nodes(work, 0, 1, 2, of=2)
    assert run == [None, None]
    assert str(other).endswith(f"belongs to run, and node 1 ({_HOST}) to other")


_WELL = RunEnd(exit_code=0, cause=None)
_LOST_PEERS = RunEnd(exit_code=1, cause="lost its peers", kind=EndKind.LOST_NODE)
_NOT_STARTED = RunEnd(exit_code=1, cause="no launch", kind=EndKind.LAUNCHER)
_KILLED = RunEnd(exit_code=137, cause="rank 1 was killed", kind=EndKind.SIGNAL, rank=1)
_SAVED = RunEnd(exit_code=75, cause="saved to step_5", kind=EndKind.STOPPED)
_KILLED_THERE = RunEnd(
    exit_code=137, cause=f"rank 1 was killed, on node 1 ({_HOST})", kind=EndKind.SIGNAL, rank=1
)


@pytest.mark.parametrize(
    ("ends", "agreed"),
    [
        pytest.param((_WELL, _WELL, _WELL), (_WELL, _WELL, _WELL), marks=pytest.mark.slow),
        ((_LOST_PEERS, _KILLED, _LOST_PEERS), (_KILLED_THERE,) * 3),
        pytest.param((_NOT_STARTED, _KILLED, _WELL), (_KILLED_THERE,) * 3, marks=pytest.mark.slow),
        pytest.param((_SAVED, _SAVED, _SAVED), (_SAVED,) * 3, marks=pytest.mark.slow),
        ((_LOST_PEERS, _LOST_PEERS, _NOT_STARTED), (_LOST_PEERS, _LOST_PEERS, _NOT_STARTED)),
    ],
)
def test_all_nodes_report_the_failure_that_is_no_consequence_of_another(
    ends: tuple[RunEnd, ...], agreed: tuple[RunEnd, ...], tmp_path: Path
) -> None:
    def work(place: NodePlace) -> object:
        with met(place, "run", {}) as meeting:
            return Heartbeat(meeting, tmp_path / "stop").agree(ends[place.node])

    assert _on_nodes(work, 0, 1, 2, of=3) == list(agreed)


def test_a_nodes_failure_ends_the_ranks_of_the_others_whose_ends_are_consequences(tmp_path: Path) -> None:
    def work(place: NodePlace) -> object:
        with met(place, "run", {}) as meeting:
            heartbeat = Heartbeat(meeting, tmp_path / "stop")
            if place.node == 1:
                return heartbeat.agree(_KILLED)
            while not heartbeat.look(lambda: True):
                time.sleep(0.1)
            return heartbeat.agree(RunEnd(exit_code=143, cause="stopped by SIGTERM", kind=EndKind.SIGNAL))

    assert _on_nodes(work, 0, 1, of=2) == [_KILLED_THERE] * 2


def test_a_single_nodes_end_is_its_own(tmp_path: Path) -> None:
    place = NodePlace(node=0, num_nodes=1, address="127.0.0.1", port=1, limit_s=1)
    with met(place, "run", {}) as meeting:
        assert Heartbeat(meeting, tmp_path / "stop").agree(_KILLED) == _KILLED
