"""The launchers of a run's nodes meet at a TCPStore on node 0, and share values through it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LOST_S = 15.0
"""Silence after which a node is considered lost. ASSUMPTION: no switch or busy node takes longer."""
_STEP_LIMIT_S = 60.0
"""Limit for each exchange between the meeting and the start. ASSUMPTION: no check takes a node longer."""
_CONNECT_S = 5.0
_POLL_S = 0.2
_FAREWELL_S = 10.0
"""How long node 0, which hosts the store, waits until the others know how the run ended."""
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
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


@dataclass(slots=True, kw_only=True)
class Meeting:
    """The nodes of a run, and the store that connects them."""

    store: Any
    """A torch.distributed.TCPStore on node 0; a HashStore for a single node."""
    place: NodePlace
    facts: tuple[dict[str, Any], ...] = ()
    """By node: its facts, with its "host" and, except for node 0, its own "address" and node 0's as seen from
    there, the "master_address"."""
    lost: list[int] = field(default_factory=list)
    """Nodes that no longer respond, the first to be noticed first."""

    @property
    def names(self) -> tuple[str, ...]:
        """Each node as named in messages."""
        return tuple(name_of(node, facts["host"]) for node, facts in enumerate(self.facts))

    @property
    def master_address(self) -> str:
        """Address at which the other nodes reached node 0, which may resolve its own name to 127.0.1.1."""
        return str(self.facts[1]["master_address"])

    def gather(self, key: str, value: Any, *, limit_s: float = _STEP_LIMIT_S) -> tuple[Any, ...]:
        """Publish a value under a key, and return the values of all nodes.

        Raises:
            UserError: a node published none within the limit, or node 0 is gone.
        """
        return self._gather(key, value, limit_s, self._lost)

    def from_node_0(self, key: str, make: Callable[[], Any]) -> Any:
        """Return a value that node 0 makes, on all nodes.

        Raises:
            UserError: a node did not come for it, or node 0 is gone.
        """
        return self.gather(key, make() if self.place.node == 0 else None)[0]

    def leave(self) -> None:
        """Leave the store. Node 0 waits until the others have left, which else could only report its loss."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            if self.place.node and 0 not in self.lost:
                within(_CONNECT_S, self.store.set, f"left/{self.place.node}", "")
            if self.place.node:
                return
            until = time.monotonic() + _FAREWELL_S
            awaited = [f"left/{node}" for node in range(1, self.place.num_nodes) if node not in self.lost]
            while awaited and not self.store.check(awaited) and time.monotonic() < until:
                time.sleep(_POLL_S)

    def _gather(
        self, key: str, value: Any, limit_s: float, error: Callable[[list[int]], UserError]
    ) -> tuple[Any, ...]:
        until = time.monotonic() + limit_s
        nodes = range(self.place.num_nodes)
        missing = [node for node in nodes if node != self.place.node]
        try:
            within(LOST_S, self.store.set, f"{key}/{self.place.node}", json.dumps(value))
            while missing and time.monotonic() < until:
                missing = [node for node in missing if not self._has(f"{key}/{node}")]
                time.sleep(_POLL_S if missing else 0)
            if not missing:
                values = within(LOST_S, self.store.multi_get, [f"{key}/{node}" for node in nodes])
                return tuple(json.loads(text) for text in values)
        except (RuntimeError, TimeoutError):  # node 0 is gone; before all have met, it has given up on these
            missing = [0] if self.facts else missing or [0]
        raise error(missing)

    def _has(self, key: str) -> bool:
        return bool(within(LOST_S, self.store.check, [key]))

    def _lost(self, missing: Sequence[int]) -> UserError:
        self.lost += missing
        nodes = ", ".join(self.names[node] for node in missing)
        return UserError(
            "node-lost",
            f"{nodes} no longer respond{'' if len(missing) > 1 else 's'}",
            found=f"{self.place.name} waited for an answer, or lost the connection",
            why="all nodes had met, so the node or the network has failed since",
            fix="see the output of that node, and its network",
            exit_code=EXIT_UNREACHABLE,
        )


@contextlib.contextmanager
def met(place: NodePlace, run: str, facts: dict[str, Any]) -> Iterator[Meeting]:
    """Wait until all nodes have come, and yield their Meeting; at the end of the context this node leaves it.

    Args:
        place: this node, and where all meet.
        run: the run's name, which must be equal on all nodes.
        facts: of this node.

    Raises:
        UserError: node 0 can't be reached, or other nodes have not come within the limit.
    """
    _import_torch()
    until = time.monotonic() + place.limit_s
    facts = {**facts, "host": socket.gethostname()}
    if place.node:
        facts["master_address"], facts["address"] = _reach_node_0(place, until)
        store = _connect(place, facts["master_address"], run, until)
    else:
        store = _host(place, run)
    meeting = Meeting(store=store, place=place)
    left_s = until - time.monotonic()
    meeting.facts = meeting._gather("facts", facts, left_s, partial(_not_come, place))
    try:
        yield meeting
    finally:
        meeting.leave()


def _import_torch() -> None:
    """Import torch, which takes seconds, before the nodes' limit begins.

    Its warnings about lost connections, with C++ stacks, would bury the messages of this process.
    """
    is_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "FATAL")
    importlib.import_module("torch.distributed")
    if not is_set:
        del os.environ[_LOG_LEVEL]  # the ranks keep their warnings


def within(limit_s: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call to a store returns.

    A thread makes it: it may never return if node 0's machine is gone, or the process on its port is silent,
    whatever the store's own limit.

    Raises:
        TimeoutError: it has not returned within the limit.
    """
    answer: Future[Any] = Future()

    def make() -> None:
        try:
            answer.set_result(call(*arguments))
        except RuntimeError as error:
            answer.set_exception(error)

    threading.Thread(target=make, daemon=True).start()
    return answer.result(timeout=limit_s)


def _host(place: NodePlace, run: str) -> Any:
    """Return the store, on node 0."""
    from torch.distributed import HashStore, TCPStore

    try:
        store: Any = (
            HashStore()
            if place.num_nodes == 1
            else TCPStore("127.0.0.1", place.port, is_master=True, wait_for_workers=False)
        )
    except RuntimeError as error:
        raise _port_taken(place, error) from None
    store.set("run", run)
    return store


def _reach_node_0(place: NodePlace, until: float) -> tuple[str, str]:
    """Return the address of node 0, and this node's own address on the route to it.

    TCPStore would wait too, but gives up at once on some errors, and prints a warning for each attempt.
    """
    while True:
        try:
            with socket.create_connection((place.address, place.port), timeout=_CONNECT_S) as connection:
                return connection.getpeername()[0], connection.getsockname()[0]
        except OSError as error:  # the name may not resolve yet, or node 0 not listen yet
            if time.monotonic() > until:
                raise _not_reached(place, error.strerror or str(error)) from None
            time.sleep(_POLL_S)


def _connect(place: NodePlace, address: str, run: str, until: float) -> Any:
    """Return a connection to the store on node 0, which must belong to the same run."""
    from torch.distributed import TCPStore

    left_s = max(_CONNECT_S, until - time.monotonic())

    def connect() -> tuple[Any, str]:
        limit = timedelta(seconds=left_s)
        store = TCPStore(address, place.port, is_master=False, wait_for_workers=False, timeout=limit)
        return store, store.get("run").decode()

    try:
        store, found = within(left_s, connect)
    except (RuntimeError, TimeoutError):
        raise _not_reached(place, "the process listening there is not a launcher") from None
    if found == run:
        return store
    raise UserError(
        "node-of-another-run",
        "node 0 belongs to another run",
        found=f"{place.address}:{place.port} belongs to {found}, and {place.name} to {run}",
        why="two runs use the same port of one node",
        fix="restart this one, or use other nodes",
        exit_code=EXIT_UNREACHABLE,
    )


def _port_taken(place: NodePlace, error: Exception) -> UserError:
    return UserError(
        "port-taken",
        "the port for the nodes' rendezvous can't be used",
        found=f"port {place.port} of {place.name}: {first_line(error)}",
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
