"""The launchers tell each other once a second how they stand, and agree on how the run ended."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.launching.clusters.meeting import EXIT_UNREACHABLE, LOST_S
from zerofit.launching.diagnose import EndKind, RunEnd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerofit.launching.clusters.meeting import Meeting

_BEAT_EVERY_S = 1.0
_POLL_S = 0.2
_CONSEQUENCES = (EndKind.LOST_NODE, EndKind.LAUNCHER, None)
"""Ends that may be consequences of another node's, or are no failure; a launcher loses the others like a
rank."""
_END_FIELDS = ("exit_code", "cause", "kind", "rank", "missing_bytes", "peak_bytes")
"""Fields of RunEnd that a node reports to the others."""


class Heartbeat:
    """The other nodes while the ranks run, as a launch sees them (`OtherNodes`).

    A thread talks to the store: a call to a node that is gone may never return.

    Args:
        meeting: the nodes; each creates its Heartbeat before it starts its ranks.
        stop_file: exists once the run must save and end, because the scheduler reclaims the nodes.

    Raises:
        UserError: a node did not come this far.
    """

    def __init__(self, meeting: Meeting, stop_file: Path) -> None:
        self._meeting, self._stop_file = meeting, stop_file
        self._node = meeting.place.node
        self._is_stopping = self._was_told_to_stop = self._is_ended_by_others = False
        self._own_end: RunEnd | None = None
        self._first_failure: tuple[int, RunEnd] | None = None
        self._has_any_failed = self._have_all_ended = False
        meeting.gather("state", {})
        now = time.monotonic()
        self._heard: list[tuple[bytes, float]] = [(b"", now)] * meeting.place.num_nodes
        self._heard_at = self._looked_at = now
        threading.Thread(target=self._beat, daemon=True).start()

    def look(self, has_begun: Callable[[], bool]) -> bool:
        """Return True if the ranks of this node must end, because another node has failed.

        Args:
            has_begun: returns True once all ranks of this node handle signals.
        """
        now = time.monotonic()
        if now - self._looked_at < _BEAT_EVERY_S:
            return self._is_ended_by_others
        self._looked_at = now
        if self._stop_file.exists():
            self._is_stopping = True
        if self._is_stopping and not self._was_told_to_stop and has_begun():
            self._was_told_to_stop = True
            os.kill(os.getpid(), signal.SIGUSR1)  # which is forwarded to the ranks (launching/watch.py)
        self._is_ended_by_others |= self._has_any_failed or self._is_any_lost()
        return self._is_ended_by_others

    def ask_to_stop(self) -> None:
        """Make the ranks of all nodes save together and end."""
        self._is_stopping = True

    def agree(self, end: RunEnd) -> RunEnd:
        """Return how the whole run ended: the first failure of any node that is no consequence of another.

        Waits until all remaining nodes have ended.
        """
        if self._is_ended_by_others:
            end = replace(end, kind=EndKind.LOST_NODE)
        self._own_end = end
        while not self._have_all_ended and not self._is_any_lost():
            time.sleep(_POLL_S)
        names, lost = self._meeting.names, self._meeting.lost
        own = None if end.kind in _CONSEQUENCES else (self._node, end)
        if (failure := self._first_failure or own) is not None:
            node, first = failure
            if len(names) == 1 or first.kind is EndKind.STOPPED:  # all nodes have
                return first
            return replace(first, cause=f"{first.cause}, on {names[node]}")
        if lost:
            cause = f"{names[lost[0]]} was lost: it sent nothing for {LOST_S:.0f} s, or its connection broke"
            return RunEnd(exit_code=EXIT_UNREACHABLE, cause=cause, kind=EndKind.LOST_NODE)
        return end

    def _is_any_lost(self) -> bool:
        if self._node and not self._have_all_ended and time.monotonic() - self._heard_at > LOST_S:
            self._lose(0)
        return bool(self._meeting.lost)

    def _lose(self, node: int) -> None:
        if node not in self._meeting.lost:
            self._meeting.lost.append(node)

    def _beat(self) -> None:
        store = self._meeting.store
        count = 0
        try:
            while not self._have_all_ended:
                count += 1
                end = self._own_end
                others_ended = self._hear(store)
                # Only the first failure is stored. It is before the state: who sees that all have ended
                # then finds it.
                own = "" if end is None or end.kind in _CONSEQUENCES else _to_text(self._node, end)
                first = store.compare_set("failure", "", own)
                self._first_failure = _from_text(first) if first else None
                ended = {} if end is None else {"has_failed": _has_failed(end)}
                state = {"count": count, "is_stopping": self._is_stopping} | ended
                store.set(f"state/{self._node}", json.dumps(state))
                self._have_all_ended = others_ended and end is not None
                time.sleep(_BEAT_EVERY_S if end is None else _POLL_S)
        except RuntimeError:  # the connection broke
            self._lose(0)

    def _hear(self, store: Any) -> bool:
        """Note the states of the other nodes, and return True if all of them have ended."""
        texts = store.multi_get([f"state/{node}" for node in range(len(self._heard))])
        self._heard_at = now = time.monotonic()
        have_ended = True
        for node, text in enumerate(texts):
            if node == self._node:
                continue
            state = json.loads(text)
            if state.get("is_stopping"):
                self._is_stopping = True
            if state.get("has_failed"):
                self._has_any_failed = True
            if text != self._heard[node][0]:
                self._heard[node] = text, now
            if "has_failed" not in state:
                have_ended = False
                if now - self._heard[node][1] > LOST_S:
                    self._lose(node)
        return have_ended


def _has_failed(end: RunEnd) -> bool:
    return end.exit_code != 0 and end.kind is not EndKind.STOPPED


def _to_text(node: int, end: RunEnd) -> str:
    return json.dumps({"node": node} | {name: getattr(end, name) for name in _END_FIELDS})


def _from_text(text: bytes) -> tuple[int, RunEnd]:
    document = json.loads(text)
    return document.pop("node"), RunEnd(**document | {"kind": EndKind(document["kind"])})
