"""The launchers of a run's nodes: they connect to node 0, and exchange their state and how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from zerofit.core.errors import UserError
from zerofit.launching.diagnose import EndKind, RunEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_TELL_EVERY_S = 1.0
LOST_S = 15.0
"""Silence after which a node is considered lost. ASSUMPTION: no switch or busy node takes longer."""
_CONNECT_S = 5.0
_ROUND_S = 0.2
_FAREWELL_S = 10.0
"""How long node 0, which hosts the store, waits until the others know how the run ended."""
_CONSEQUENCES = (EndKind.LOST_NODE, EndKind.LAUNCHER, None)
"""Ends that may be consequences of another node's, or are no failure; a launcher loses the others like a
rank."""
EXIT_UNREACHABLE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """This node's number, and where the nodes meet."""

    node: int
    """This node's number, from 0."""
    num_nodes: int
    address: str
    """Name or address of node 0."""
    port: int
    """Port on node 0 for the launchers; the ranks use others."""
    limit_s: float
    """How long the nodes wait for each other."""

    @property
    def name(self) -> str:
        """This node in a message: "node 1 (gpu-07)"."""
        return name_of(self.node, socket.gethostname())


def name_of(node: int, host: str) -> str:
    """Return a node as named in messages."""
    return f"node {node} ({host})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The store of all nodes, and each node's facts."""

    store: Any
    """A torch.distributed.TCPStore on node 0."""
    place: NodePlace
    facts: tuple[dict[str, Any], ...]
    """By node: its facts, with its "host" and the "address" at which others reach it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Each node as named in messages."""
        return tuple(name_of(node, one["host"]) for node, one in enumerate(self.facts))

    @property
    def master_address(self) -> str:
        """Address at which the other nodes reached node 0, which may resolve its own name to 127.0.1.1."""
        return str(self.facts[1]["master_address"])

    def tell(self, key: str, value: str) -> None:
        """Publish a value to all nodes.

        Raises:
            UserError: node 0 does not respond.
        """
        self._answer(lambda: self.store.set(key, value))

    def hear(self, key: str, *, limit_s: float) -> str | None:
        """Return a published value; None if it is not published within the limit.

        Raises:
            UserError: node 0 does not respond.
        """
        until = time.monotonic() + limit_s
        while True:
            if self._answer(lambda: self.store.check([key])):
                return str(self._answer(lambda: self.store.get(key)).decode())
            if time.monotonic() > until:
                return None
            time.sleep(_ROUND_S)

    def by_node_0(self, key: str, make: Callable[[], str]) -> str:
        """Return a value made by node 0, on all nodes.

        Raises:
            UserError: node 0 does not respond.
        """
        if self.place.node == 0:
            self.tell(key, make())
        value = self.hear(key, limit_s=self.place.limit_s)
        if value is None:
            raise self.lost(0)
        return value

    def _answer(self, operation: Callable[[], Any]) -> Any:
        """Return the store's answer; calls to a store that is gone may never return."""
        answers: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(operation())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(timeout=LOST_S)
        if not answers:
            raise self.lost(0)
        return answers[0]

    def lost(self, node: int) -> UserError:
        """Return the error for a node that was lost after all had met."""
        return UserError(
            "node-lost",
            f"{self.names[node]} no longer responds",
            found=f"{self.place.name} has received nothing from it for {LOST_S:.0f} s, or lost the "
            "connection",
            why="it had met the other nodes, so it or the network has failed since",
            fix="see the output of that node, and its network",
            exit_code=EXIT_UNREACHABLE,
        )


def meet(place: NodePlace, run: str, facts: dict[str, Any]) -> Meeting:
    """Wait until all nodes are connected, and return their Meeting.

    Args:
        run: the run's name, which must be equal on all nodes.
        facts: of this node.

    Raises:
        UserError: node 0 can't be reached, or other nodes have not come within the limit.
    """
    from torch.distributed import TCPStore

    until = time.monotonic() + place.limit_s
    limit = timedelta(seconds=place.limit_s)
    facts = {**facts, "host": socket.gethostname()}
    if place.node == 0:
        try:
            store = TCPStore("127.0.0.1", place.port, is_master=True, wait_for_workers=False, timeout=limit)
        except RuntimeError as error:
            raise _port_taken(place, error) from None
        store.set("run", run)
    else:
        facts["master_address"], facts["address"] = _reach(place, until)
        try:
            store = connect(place, facts["master_address"])
            _check_same_run(store, place, run)
        except RuntimeError:
            raise _not_reached(place, "the process listening there is not a launcher") from None
    missing = [node for node in range(place.num_nodes) if node != place.node]
    said: list[Any] = []
    with contextlib.suppress(RuntimeError):  # node 0 has given up for the same reason
        store.set(f"beat/{place.node}", "0")
        store.set(f"said/{place.node}", json.dumps(facts))
        while missing and time.monotonic() < until:
            missing = [node for node in missing if not store.check([f"said/{node}"])]
            time.sleep(_ROUND_S)
        if not missing:
            said = [json.loads(store.get(f"said/{node}")) for node in range(place.num_nodes)]
    if missing:
        raise _not_come(place, missing)
    if not said:
        raise _not_reached(place, "it has disconnected")
    return Meeting(store=store, place=place, facts=tuple(said))


def connect(place: NodePlace, master_address: str) -> Any:
    """Return a new connection to the store on node 0."""
    from torch.distributed import TCPStore

    return TCPStore(
        master_address if place.node else "127.0.0.1",
        place.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=place.limit_s),
    )


def _reach(place: NodePlace, until: float) -> tuple[str, str]:
    """Return the address of node 0, and this node's own address on the route to it."""
    while True:
        try:
            address = str(socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0][4][0])
            connection = socket.create_connection((address, place.port), timeout=_CONNECT_S)
        except OSError as error:  # the name may not resolve yet, or node 0 not listen yet
            if time.monotonic() > until:
                raise _not_reached(place, error.strerror or str(error)) from None
            time.sleep(_ROUND_S)
            continue
        with connection:
            return connection.getpeername()[0], connection.getsockname()[0]


def _check_same_run(store: Any, place: NodePlace, run: str) -> None:
    until = time.monotonic() + _CONNECT_S
    while not store.check(["run"]) and time.monotonic() < until:
        time.sleep(_ROUND_S)
    other = store.get("run").decode() if store.check(["run"]) else "another program"
    if other != run:
        raise UserError(
            "node-of-another-run",
            "node 0 belongs to another run",
            found=f"{place.address}:{place.port} belongs to {other}, and {place.name} to {run}",
            why="two runs use the same port of one node",
            fix="restart this one, or use other nodes",
            exit_code=EXIT_UNREACHABLE,
        )


def _port_taken(place: NodePlace, error: Exception) -> UserError:
    return UserError(
        "port-taken",
        "the port for the nodes' rendezvous can't be used",
        found=f"port {place.port} of {place.name}: {str(error).splitlines()[0]}",
        why="another process listens on it, and the other nodes wait for this one",
        fix="restart the job, or use another node",
        exit_code=EXIT_UNREACHABLE,
    )


def _not_reached(place: NodePlace, problem: str) -> UserError:
    return UserError(
        "node-unreachable",
        "node 0 does not respond",
        found=f"{place.name} can't reach node 0 at {place.address}, port {place.port}: "
        f"{problem} ({place.limit_s:.0f} s)",
        why="all nodes meet at node 0: its name or address is wrong, it is not running, or a firewall "
        "blocks it",
        fix=f"check that {place.address} is node 0, that its launcher has started, and that the port is open",
        exit_code=EXIT_UNREACHABLE,
    )


def _not_come(place: NodePlace, missing: Sequence[int]) -> UserError:
    nodes = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {place.num_nodes}"
    return UserError(
        "node-missing",
        f"{nodes} did not come",
        found=f"{place.name} has waited {place.limit_s:.0f} s",
        why="the ranks of all nodes train together, so none can start",
        fix="see the output of these nodes: their launcher did not start, or they can't reach node 0",
        exit_code=EXIT_UNREACHABLE,
    )


def interface_to(address: str) -> str | None:
    """Return the network interface on the route to an address; None if unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it queries the routing table
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(one.address == own for one in addresses):
                return name
    return None


class Peers:
    """Exchanges state with the other nodes while the ranks run.

    A thread talks to the store, over its own connection: a call to a node that is gone may never return.

    Args:
        meeting: None for a single node.
        stop_file: exists once the run must save and end, because the scheduler reclaims the nodes.
    """

    def __init__(self, meeting: Meeting | None, stop_file: Path) -> None:
        self._meeting, self._stop_file = meeting, stop_file
        self._node = 0 if meeting is None else meeting.place.node
        self._num_nodes = 1 if meeting is None else meeting.place.num_nodes
        now = time.monotonic()
        self._beats = [(b"", now)] * self._num_nodes
        self._heard_at = self._looked_at = now
        self._ends: dict[int, tuple[float, RunEnd]] = {}
        self._own_end: tuple[float, RunEnd] | None = None
        self._is_ended_by_others = False
        self._is_asked_to_stop = self._was_told_to_stop = self._is_leaving = False
        self._num_left = 0
        self._thread = threading.Thread(target=self._talk, daemon=True)
        if meeting is not None:
            self._thread.start()

    def look(self, has_begun: Callable[[], bool]) -> bool:
        """Return True if the ranks of this node must end, because another node has failed.

        Args:
            has_begun: returns True once all ranks of this node handle signals.
        """
        now = time.monotonic()
        if now - self._looked_at < _TELL_EVERY_S:
            return self._is_ended_by_others
        self._looked_at = now
        self._is_asked_to_stop |= self._stop_file.exists()
        if self._is_asked_to_stop and not self._was_told_to_stop and has_begun():
            self._was_told_to_stop = True
            os.kill(os.getpid(), signal.SIGUSR1)  # which is forwarded to the ranks (launching/watch.py)
        failed = [end for _, end in self._ends.values() if end.exit_code and end.kind is not EndKind.STOPPED]
        self._is_ended_by_others |= self._lost() is not None or bool(failed)
        return self._is_ended_by_others

    def check(self) -> None:
        """Check that no node is lost.

        Raises:
            UserError: one is.
        """
        if self._meeting is not None and (node := self._lost()) is not None:
            raise self._meeting.lost(node)

    def ask_to_stop(self) -> None:
        """Make the ranks of all nodes save together and end."""
        self._is_asked_to_stop = True

    def agree(self, end: RunEnd) -> RunEnd:
        """Return how the whole run ended: the first failure of any node that is no consequence of another.

        Waits until all remaining nodes have ended.
        """
        if self._meeting is None:
            return end
        if self._is_ended_by_others:
            end = replace(end, kind=EndKind.LOST_NODE)
        self._own_end = time.time(), end
        while len(self._ends) < self._num_nodes and self._lost() is None:
            time.sleep(_ROUND_S)
        lost = self._lost()
        self._ends.setdefault(self._node, self._own_end)
        verdict = self._judge(end, lost)
        self._is_leaving = True
        until = time.monotonic() + (_FAREWELL_S if lost is None else LOST_S + _FAREWELL_S)
        if self._node == 0:
            gone = self._num_nodes - 1 if lost is None else self._num_nodes - 2
            while self._num_left < gone and time.monotonic() < until:
                time.sleep(_ROUND_S)
        else:
            self._thread.join(timeout=_FAREWELL_S)
        return verdict

    def _judge(self, own: RunEnd, lost: int | None) -> RunEnd:
        causes = [(at, node) for node, (at, end) in self._ends.items() if end.kind not in _CONSEQUENCES]
        if causes and self._meeting is not None:
            _, node = min(causes)
            _, end = self._ends[node]
            if end.kind is EndKind.STOPPED:
                return end  # all nodes have
            return replace(end, cause=f"{end.cause}, on {self._meeting.names[node]}")
        if lost is not None and self._meeting is not None:
            cause = f"{self._meeting.names[lost]} was lost: nothing was received from it for {LOST_S:.0f} s"
            return RunEnd(exit_code=EXIT_UNREACHABLE, cause=cause, kind=EndKind.LOST_NODE)
        return own

    def _lost(self) -> int | None:
        """Return the first node that has gone silent; node 0 if the store is gone."""
        now = time.monotonic()
        if self._meeting is None or len(self._ends) == self._num_nodes:
            return None
        if self._node and now - self._heard_at > LOST_S:
            return 0
        silent = (
            node
            for node, (_, at) in enumerate(self._beats)
            if now - at > LOST_S and node not in self._ends and node != self._node
        )
        return next(silent, None)

    def _talk(self) -> None:
        assert self._meeting is not None
        count, is_told, is_asked = 0, False, False
        with contextlib.suppress(RuntimeError):  # the store is gone, with node 0; then nothing is received
            store = connect(self._meeting.place, self._meeting.master_address)
            while True:
                count += 1
                store.set(f"beat/{self._node}", str(count))
                if self._own_end is not None and not is_told:
                    is_told = True
                    store.set(f"end/{self._node}", _to_text(*self._own_end))
                    store.add("ends", 1)
                if self._is_asked_to_stop and not is_asked:
                    is_asked = True
                    store.add("stop", 1)
                self._hear(store)
                if self._is_leaving and self._node:
                    store.add("left", 1)
                    return
                time.sleep(_TELL_EVERY_S if self._own_end is None else _ROUND_S)

    def _hear(self, store: Any) -> None:
        beats = store.multi_get([f"beat/{node}" for node in range(self._num_nodes)])
        now = time.monotonic()
        for node, beat in enumerate(beats):
            if beat != self._beats[node][0]:
                self._beats[node] = beat, now
        if store.add("ends", 0) > len(self._ends):
            for node in range(self._num_nodes):
                if node not in self._ends and store.check([f"end/{node}"]):
                    self._ends[node] = _from_text(store.get(f"end/{node}"))
        if store.add("stop", 0):
            self._is_asked_to_stop = True
        self._num_left = store.add("left", 0)
        self._heard_at = time.monotonic()


_END_FIELDS = ("exit_code", "cause", "kind", "rank", "missing_bytes", "peak_bytes")
"""Fields of RunEnd that a node reports to the others."""


def _to_text(at: float, end: RunEnd) -> str:
    return json.dumps({"at": at} | {name: getattr(end, name) for name in _END_FIELDS})


def _from_text(text: bytes) -> tuple[float, RunEnd]:
    document = json.loads(text)
    at, kind = document.pop("at"), document.pop("kind")
    return at, RunEnd(kind=None if kind is None else EndKind(kind), **document)
