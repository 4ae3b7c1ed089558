"""Ranks meet before a call, whoever is first; who waits in vain is told where the others stand."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from zerofit.core.errors import UserError
from zerofit.ranks import meeting
from zerofit.ranks.meeting import RankMeetings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LONG_S = 60.0
"""No test waits so long: what waits for it to pass fails."""


class Ranks:
    """Ranks on threads, each with its own connection to one store, and all but the silent ones answering."""

    def __init__(self, world_size: int, *, silent: frozenset[int] = frozenset()) -> None:
        from torch.distributed import PrefixStore, TCPStore

        self._server = TCPStore("127.0.0.1", 0, is_master=True)
        self.meetings = [
            RankMeetings(
                PrefixStore("meetings", self._client(TCPStore)),
                rank=rank,
                world_size=world_size,
                place=lambda rank=rank: self.places[rank],
                left_to_another_s=0.2,
                answers_within_s=0.5,
            )
            for rank in range(world_size)
        ]
        self.places = {rank: f"train.py:{90 + rank}: forward()" for rank in range(world_size)}
        self._done = threading.Event()
        self._answering = [
            threading.Thread(target=self._answer, args=(meetings,))
            for rank, meetings in enumerate(self.meetings)
            if rank not in silent
        ]
        for thread in self._answering:
            thread.start()

    def _client(self, store: Any) -> Any:
        return store("127.0.0.1", self._server.port, is_master=False, timeout=timedelta(seconds=20))

    def _answer(self, meetings: RankMeetings) -> None:
        while not self._done.wait(0.01):
            meetings.answer()

    def run(self, acts: Sequence[Callable[[RankMeetings], object]]) -> list[str | None]:
        """Let each rank act; return what each was told, None where nothing was wrong."""

        def outcome(act: Callable[[RankMeetings], object], meetings: RankMeetings) -> str | None:
            try:
                act(meetings)
            except UserError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(len(acts)) as pool:
            return list(pool.map(outcome, acts, self.meetings))

    def end(self) -> None:
        self._done.set()
        for thread in self._answering:
            thread.join()


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    """Return a function that makes ranks, which end with the test."""
    made: list[Ranks] = []

    def make(world_size: int, **more: Any) -> Ranks:
        made.append(Ranks(world_size, **more))
        return made[-1]

    yield make
    for one in made:
        one.end()


def call(
    name: str = "model.generate", *, after_s: float = 0, limit_s: float = LONG_S
) -> Callable[[RankMeetings], None]:
    """Return an act: a call that all ranks must make."""

    def act(meetings: RankMeetings) -> None:
        time.sleep(after_s)
        meetings.meet(name, line="train.py:83", limit_s=limit_s)

    return act


def nothing(meetings: RankMeetings) -> None:
    """Be a rank that does not come."""


def ends(exit_code: int) -> Callable[[RankMeetings], None]:
    """Return an act: the script ends."""
    return lambda meetings: meetings.tell_ended(exit_code)


def error(found: str, *, waited: str = "", name: str = "model.generate") -> str:
    """Return the whole error."""
    headline = f"error[generate-not-on-all-ranks]: {name}() was not called on all ranks\n  found: {found}\n"
    if name == "zerofit.generate":
        return (
            f"{headline}"
            f"  why:   all ranks share the work and the results{waited}\n"
            "  fix:   call it equally often on all ranks, with per_rank=True and an empty list on ranks "
            "without prompts; if ranks are only slow, raise limit_s="
        )
    return (
        f"{headline}"
        f"  why:   each rank holds a part of the weights and must take part in every forward pass{waited}\n"
        "  fix:   call it equally often on all ranks, or zerofit.generate(), which takes any number of "
        "prompts on each; if ranks are only slow, raise --generate-limit SECONDS of zerofit launch\n"
        "  see:   https://huggingface.co/docs/transformers/main_classes/deepspeed"
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_meet_whoever_is_first_and_as_often_as_they_call(
    world_size: int, ranks: Callable[..., Ranks]
) -> None:
    left: list[float] = []

    def acts(rank: int) -> Callable[[RankMeetings], None]:
        def act(meetings: RankMeetings) -> None:
            call(after_s=0.3 if rank == 1 else 0)(meetings)
            left.append(time.monotonic())
            for _ in range(20):
                call()(meetings)

        return act

    began = time.monotonic()
    assert ranks(world_size).run([acts(rank) for rank in range(world_size)]) == [None] * world_size
    assert min(left) - began >= 0.3


def alone(rank: int, others: str, *, waited_s: float | None = None, name: str = "model.generate") -> str:
    """Return the whole error of a rank that came alone."""
    waited = "" if waited_s is None else f"; rank {rank} waited {waited_s} s"
    return error(f"train.py:83 on rank {rank} alone; {others}", waited=waited, name=name)


IN_VAIN = {
    "one of two comes": (
        [call(limit_s=0.4), nothing],
        [alone(0, "rank 1 is at train.py:91: forward()", waited_s=0.4), None],
    ),
    "one of four comes": (
        [nothing, call(limit_s=0.4), nothing, nothing],
        [
            None,
            alone(
                1,
                "rank 0 is at train.py:90: forward(); rank 2 is at train.py:92: forward(); rank 3 is at "
                "train.py:93: forward()",
                waited_s=0.4,
            ),
            None,
            None,
        ],
    ),
    "two calls of different names do not meet": (
        [call(limit_s=0.4), call("zerofit.generate", after_s=0.2, limit_s=0.9)],
        [
            alone(0, "rank 1 is at train.py:91: forward()", waited_s=0.4),
            alone(1, "rank 0 is at train.py:90: forward()", waited_s=0.9, name="zerofit.generate"),
        ],
    ),
    "a script that has ended is not waited for": (
        [call(), ends(0)],
        [alone(0, "the script of rank 1 has ended"), None],
    ),
    "a rank that failed speaks for itself": (
        [call(limit_s=0.4), ends(1)],
        [alone(0, "rank 1 is at train.py:91: forward()", waited_s=0.4), None],
    ),
}


@pytest.mark.parametrize(("acts", "told"), IN_VAIN.values(), ids=IN_VAIN)
def test_who_waits_in_vain_is_told_where_the_others_stand(
    acts: Sequence[Callable[[RankMeetings], None]], told: list[str | None], ranks: Callable[..., Ranks]
) -> None:
    assert ranks(len(acts)).run(acts) == told


def test_scripts_that_had_ended_before_are_named_together(ranks: Callable[..., Ranks]) -> None:
    here = ranks(4)
    assert here.run([nothing, ends(0), ends(0), nothing]) == [None] * 4
    assert here.run([call(), nothing, nothing, nothing]) == [
        alone(0, "the scripts of ranks 1-2 have ended; rank 3 is at train.py:93: forward()"),
        *[None] * 3,
    ]


def test_a_rank_that_can_not_answer_is_named(ranks: Callable[..., Ranks]) -> None:
    here = ranks(2, silent=frozenset({1}))
    assert here.run([call(limit_s=0.4), nothing])[0] == alone(0, "rank 1 does not answer", waited_s=0.4)


def test_of_several_that_wait_all_are_named(ranks: Callable[..., Ranks]) -> None:
    here = ranks(4)
    here.places |= {1: "train.py:91: forward()", 3: "train.py:91: forward()"}
    first, one, second, other = here.run([call(limit_s=0.4), nothing, call(limit_s=0.5), nothing])
    assert first == error(
        "train.py:83 on ranks 0, 2; ranks 1, 3 are at train.py:91: forward()",
        waited="; ranks 0, 2 waited 0.4 s",
    )
    assert second is not None
    assert one is None
    assert other is None


def test_a_script_that_catches_the_error_meets_again(ranks: Callable[..., Ranks]) -> None:
    here = ranks(2)
    told = here.run([call(limit_s=0.3), nothing])
    assert told[0] is not None
    assert here.run([call(), call(after_s=0.2)]) == [None, None]
    assert here.run([nothing, call(limit_s=0.3)])[1] is not None
    assert here.run([call(after_s=0.2), call()]) == [None, None]


def test_a_rank_with_one_call_more_waits_in_vain_for_that_one(ranks: Callable[..., Ranks]) -> None:
    def calls(*limits_s: float) -> Callable[[RankMeetings], None]:
        def act(meetings: RankMeetings) -> None:
            for limit_s in limits_s:
                call(limit_s=limit_s)(meetings)

        return act

    told = ranks(2).run([calls(LONG_S, LONG_S, 0.3), calls(LONG_S, LONG_S)])
    assert told[0] is not None
    assert told[1] is None


def test_a_store_that_has_gone_is_said(ranks: Callable[..., Ranks]) -> None:
    here = ranks(2, silent=frozenset({0, 1}))
    del here._server
    assert here.run([call(limit_s=0.3), nothing])[0] == (
        "error[generate-not-on-all-ranks]: the other ranks have gone before model.generate()\n"
        "  found: train.py:83, where the ranks' store (TCPStore) does not respond\n"
        "  why:   rank 0 or the launcher on the first node keeps the store, and has ended\n"
        "  fix:   look for the error of the rank that ended first in its log"
    )


@pytest.mark.slow
def test_ranks_of_a_process_group_see_where_a_rank_is_stuck(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "ranks_that_meet.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*command, str(script), str(tmp_path / "told")], cwd=tmp_path, check=True, timeout=120)
    (alone, *others), nothing = (json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(2))
    lines = script.read_text().splitlines()
    meets, calls, waits = (
        next(number for number, text in enumerate(lines, start=1) if code in text)
        for code in ('    meet("model.generate"', "alone = found", "dist.barrier()")
    )
    assert alone == (
        f"{script}:{meets} (called at {script}:{calls}) on rank 0 alone; "
        f"rank 1 is at {script}:{waits}: {lines[waits - 1]}"
    )
    assert others == [None, None]
    assert nothing == [None, None, None]


def test_a_second_process_group_does_not_find_the_firsts_calls_on_their_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed import PrefixStore, TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True)
    here = threading.local()  # each thread is a rank, in a process group with a source of its own
    group = {"get_rank": lambda: here.rank, "get_world_size": lambda: 2, "get_backend": lambda: "gloo"}
    store = SimpleNamespace(_get_default_store=lambda: here.source)
    module = SimpleNamespace(
        **group, is_initialized=lambda: True, distributed_c10d=store, PrefixStore=PrefixStore
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    is_done = threading.Event()

    def begin_group() -> None:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))
        here.source = PrefixStore("default_pg", client)

    def act(rank: int) -> str | None:
        here.rank, this = rank, meeting._ThisRank()
        begin_group()
        this.meet("model.generate", line="train.py:83", limit_s=LONG_S)
        begin_group()
        if rank == 0:
            try:
                with pytest.raises(UserError) as error:
                    this.meet("model.generate", line="train.py:95", limit_s=0.5)
            finally:
                is_done.set()
            return error.value.found
        while not is_done.wait(0.01):
            this._opened().answer()
        return None

    with ThreadPoolExecutor(2) as pool:
        found, _ = pool.map(act, range(2))
    assert str(found).startswith("train.py:95 on rank 0 alone; rank 1 is at ")


def test_a_store_that_has_gone_is_no_matter_to_a_script_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("the connection is closed")

    monkeypatch.setattr(meeting, "_process_group", gone)
    monkeypatch.setattr(meeting._this_rank, "_thread", threading.current_thread())
    meeting.tell_ended(0)
