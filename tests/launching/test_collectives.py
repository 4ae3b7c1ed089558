"""Which ranks did not come to a collective, or call another one, by NCCL's watchdog and flight recorder."""

from __future__ import annotations

import io

import pytest

from zerofit.launching.collectives import Collective, group_of_rank, mismatch_in, timed_out_rank
from zerofit.launching.explain import explain_bytes
from zerofit.launching.explain_run import stuck_collectives
from zerofit.launching.failures import failures


def _line(
    rank: int, number: int, call: str = "ALLREDUCE 8", group: str = "", prefix: int | None = None
) -> str:
    operation, _, size = call.partition(" ")
    sizes = f"NumelIn={size}, NumelOut={size}, " if size else ""
    return (
        f"[rank{rank if prefix is None else prefix}]:[E704 09:15:00.1 ProcessGroupNCCL.cpp:629] "
        f"[{group}Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, "
        f"OpType={operation}, {sizes}Timeout(ms)=900000) ran for 900021 milliseconds before timing out.\n"
    )


def _explained(log: str) -> tuple[str | None, int | None, list[str]]:
    found = explain_bytes(io.BytesIO(log.encode()), "log")
    cause = found.cause
    if cause is None:
        return None, None, list(found.waits)
    return cause.failure.id, cause.at.rank, list(found.waits)


@pytest.mark.parametrize(
    ("log", "rank", "sentence"),
    [
        (
            _line(2, 51, "ALLGATHER") + _line(0, 51) + _line(1, 51),
            2,
            "rank 2 calls ALLGATHER as collective number 51, where ranks 0-1 call ALLREDUCE of 8 elements",
        ),
        (  # the accused does not depend on the alphabet
            _line(2, 51, "REDUCE 8") + _line(0, 51) + _line(1, 51),
            2,
            "rank 2 calls REDUCE of 8 elements as collective number 51, "
            "where ranks 0-1 call ALLREDUCE of 8 elements",
        ),
        (
            _line(0, 9, "_ALLGATHER_BASE 64")
            + _line(1, 9, "_ALLGATHER_BASE 32")
            + _line(3, 9, "_ALLGATHER_BASE 64"),
            1,
            "rank 1 calls _ALLGATHER_BASE of 32 elements as collective number 9, "
            "where ranks 0, 3 call _ALLGATHER_BASE of 64 elements",
        ),
        (
            "".join(_line(rank, 4, "BROADCAST 1" if rank in (5, 6) else "ALLREDUCE 8") for rank in range(8)),
            5,
            "ranks 5-6 call BROADCAST of 1 elements as collective number 4, "
            "where ranks 0-4, 7 call ALLREDUCE of 8 elements",
        ),
        (
            _line(0, 30) + _line(1, 30, "BROADCAST 8"),
            0,
            "ranks disagree on collective number 30: rank 0 calls ALLREDUCE of 8 elements, "
            "rank 1 calls BROADCAST of 8 elements",
        ),
        (
            _line(0, 3, group="PG ID 1 PG GUID 5(tp) ", prefix=2)
            + _line(1, 3, "BROADCAST 8", group="PG ID 2 PG GUID 5(tp) ", prefix=3)
            + _line(2, 3, group="PG ID 1 PG GUID 5(tp) ", prefix=7),
            3,  # not the rank within its group
            "rank 3 calls BROADCAST of 8 elements as collective number 3, "
            "where ranks 2, 7 call ALLREDUCE of 8 elements",
        ),
    ],
)
def test_ranks_that_call_something_else_at_one_number_are_a_mismatch(
    log: str, rank: int, sentence: str
) -> None:
    cause, at_rank, waits = _explained(log)
    assert (cause, at_rank, waits[0]) == ("collective-mismatch", rank, sentence)


@pytest.mark.parametrize(
    "log",
    [
        _line(0, 7) + _line(1, 7),
        _line(0, 7) + _line(1, 6, "BROADCAST 4"),
        _line(0, 7, "ALLTOALL_BASE 4") + _line(1, 7, "ALLTOALL_BASE 8"),  # which may differ in size
        _line(0, 7, "SEND 4") + _line(1, 7, "RECV 4"),
        _line(0, 7, "ALLREDUCE") + _line(1, 7, "ALLREDUCE 8"),
        _line(0, 7, group="PG GUID 1(dp) ") + _line(1, 7, "BROADCAST 8", group="PG GUID 2(tp) "),
        _line(0, 7) + _line(0, 8, "BROADCAST 8"),
    ],
)
def test_calls_that_may_differ_are_no_mismatch(log: str) -> None:
    assert _explained(log)[0] == "nccl-timeout"


@pytest.mark.parametrize(
    ("log", "waits"),
    [
        (
            _line(3, 81233) + _line(4, 81233),
            [
                "the log has no failure of ranks 0-2, nor of any rank above 4: only their own logs tell "
                "where they were"
            ],
        ),
        (
            _line(0, 12) + _line(1, 12) + _line(2, 11),
            ["rank 2 waited in collective number 11, ALLREDUCE, behind ranks 0-1 in number 12, ALLREDUCE"],
        ),
        (
            _line(0, 12) + _line(1, 12) + _line(2, 13),
            ["rank 2 waited in collective number 13, ALLREDUCE, ahead of ranks 0-1 in number 12, ALLREDUCE"],
        ),
        (
            "[rank2]: OSError: [Errno 28] No space left on device\n" + _line(0, 12) + _line(1, 12),
            [
                "rank 2 reported another failure and no time-out, while ranks 0-1 waited in collective "
                "number 12, ALLREDUCE: look there"
            ],
        ),
        (_line(5, 3, group="PG GUID 4(ep) "), []),  # who else is in that group is unknown
        (_line(0, 3) + _line(1, 3), []),
    ],
)
def test_ranks_that_the_log_does_not_have_are_not_accused(log: str, waits: list[str]) -> None:
    assert _explained(log)[2] == waits


@pytest.mark.parametrize(
    ("group", "log_rank", "rank", "named"),
    [
        ("", None, 3, None),
        ("", 9, 9, None),
        ("PG 0 ", None, 3, "0"),
        ("PG 0 (default_pg) ", None, 3, "0 (default_pg)"),
        ("PG ID 0 PG GUID 0(default_pg) ", None, 3, "0(default_pg)"),
        ("PG ID 2 PG GUID 11(mesh_dp) ", 9, 9, "11(mesh_dp)"),
        ("PG ID 2 PG GUID 11(mesh_dp) ", None, 3, "11(mesh_dp)"),
    ],
)
def test_rank_and_group_of_the_watchdogs_line(
    group: str, log_rank: int | None, rank: int, named: str | None
) -> None:
    text = _line(3, 17, group=group)
    expected = Collective(group=named, number=17, operation="ALLREDUCE", sizes="8 elements")
    assert timed_out_rank(text, log_rank=log_rank) == (rank, expected)
    assert timed_out_rank("[Rank 3] Watchdog is alive", log_rank=log_rank) is None


def test_another_line_names_the_group() -> None:
    at_work = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Timeout at NCCL work: 808, last enqueued: 809"
    assert group_of_rank(at_work) == (1, 808, "0(default_pg)")
    assert group_of_rank("[Rank 1] Timeout at NCCL work: 808") is None


@pytest.mark.parametrize(
    ("taken_down", "blamed"), [((), "ranks 2-3"), ((3,), "rank 2"), ((2,), "rank 3"), ((2, 3), None)]
)
def test_a_rank_that_the_watchdog_ended_waited_too(taken_down: tuple[int, ...], blamed: str | None) -> None:
    words = (
        "Some NCCL operations have failed or timed out.",
        "To avoid data inconsistency, we are taking the entire process down",
    )
    log = "[rank2]: Broken pipe\n[rank3]: Broken pipe\n" + _line(0, 9) + _line(1, 9)
    for rank in taken_down:
        log += f"[rank{rank}]:[E704 09:15:00.1 ProcessGroupNCCL.cpp:689] [Rank {rank}] {words[rank % 2]}\n"
    _, _, waits = _explained(log)
    silent = [sentence.partition(" reported ")[0] for sentence in waits if "no time-out" in sentence]
    assert silent == ([blamed] if blamed else [])


_AT_WORK = (
    "[rank{rank}]:[E704 09:15:00.3 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
    "Exception (either an error or timeout) detected by watchdog at work: {number}, last enqueued: 99\n"
)


def _named(rank: int, number: int, call: str = "ALLREDUCE 8") -> str:
    return _line(rank, number, call) + _AT_WORK.format(rank=rank, number=number)


@pytest.mark.parametrize(
    ("log", "rank", "sentence"),
    [
        (  # rank 0 has no line that names its group
            _named(1, 4821) + _line(0, 4821) + _named(2, 4821) + _named(3, 4790),
            3,
            "rank 3 waited in collective number 4790, ALLREDUCE, behind ranks 0-2 in number 4821, ALLREDUCE",
        ),
        (
            _line(0, 12) + _line(1, 12) + _line(2, 13),
            2,
            "rank 2 waited in collective number 13, ALLREDUCE, ahead of ranks 0-1 in number 12, ALLREDUCE",
        ),
        (
            _line(0, 8) + _line(1, 7, "BROADCAST 4"),
            1,
            "rank 1 waited in collective number 7, BROADCAST, behind rank 0 in number 8, ALLREDUCE",
        ),
        (  # behind comes before ahead
            _line(0, 6) + _line(1, 5) + _line(2, 5) + _line(3, 4, "BROADCAST 4"),
            3,
            "rank 3 waited in collective number 4, BROADCAST, behind ranks 1-2 in number 5, ALLREDUCE",
        ),
        (
            _named(0, 31) + _named(3, 31) + _line(1, 9) + _line(2, 9) + _named(4, 31),
            1,
            "ranks 1-2 waited in collective number 9, ALLREDUCE, behind ranks 0, 3-4 in number 31, ALLREDUCE",
        ),
        (  # before torch 2.2 no line begins with its rank
            (_line(0, 96) + _line(1, 96) + _line(7, 64)).replace("[rank", "[was"),
            7,
            "rank 7 waited in collective number 64, ALLREDUCE, behind ranks 0-1 in number 96, ALLREDUCE",
        ),
        (  # the one with the name is apart
            _line(0, 22) + _line(1, 22) + _named(2, 9, "_ALLGATHER_BASE 64"),
            2,
            "rank 2 waited in collective number 9, _ALLGATHER_BASE, behind ranks 0-1 in number 22, ALLREDUCE",
        ),
    ],
)
def test_the_cause_is_the_rank_that_is_out_of_step(log: str, rank: int, sentence: str) -> None:
    found = explain_bytes(io.BytesIO(log.encode()), "log")
    assert found.cause is not None
    assert (found.cause.failure.id, found.cause.at.rank) == ("nccl-timeout", rank)
    assert found.cause.confidence == "medium"
    assert f"[rank{rank}]" not in found.cause.at.text
    assert f"Rank {rank}]" in found.cause.at.text
    assert found.cause.failure.why == sentence
    assert sentence.partition(" waited")[0] in found.cause.failure.fix
    assert sentence in found.waits


@pytest.mark.parametrize(
    "log",
    [
        _line(0, 7) + _line(1, 7),
        _line(4, 7),
        _line(0, 7, group="PG GUID 1(dp) ") + _line(1, 9, group="PG GUID 2(tp) "),
        _named(0, 7) + _line(1, 7) + _line(2, 7),
        _line(0, 7, group="PG GUID 5(dp) ") + _line(1, 9),  # which may wait in another group
    ],
)
def test_no_rank_is_the_cause_where_none_is_out_of_step(log: str) -> None:
    found = explain_bytes(io.BytesIO(log.encode()), "log")
    assert found.cause is not None
    assert found.cause.failure == failures()["nccl-timeout"]
    assert (found.cause.at.line, found.cause.confidence) == (1, "low")


def test_another_root_cause_comes_before_a_rank_out_of_step() -> None:
    full = "[rank1]: OSError: [Errno 28] No space left on device\n"
    assert _explained(_line(0, 12) + _line(2, 12) + _line(3, 11) + full)[:2] == ("disk-full", 1)


def test_no_rank_waits() -> None:
    assert mismatch_in({}) is None


def _dump(*calls: tuple[int, str, int]) -> dict[str, object]:
    entries = [
        {
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "profiling_name": f"nccl:{name}",
            "input_sizes": [[size]],
            "state": "completed" if number < calls[-1][0] else "scheduled",
            "is_p2p": False,
        }
        for number, name, size in calls
    ]
    return {"entries": entries}


@pytest.mark.parametrize(
    ("dumps", "sentences"),
    [
        (
            {
                rank: _dump((4, "all_reduce", 8), (5, "broadcast" if rank == 1 else "all_reduce", 8))
                for rank in range(3)
            },
            [
                "group 0/default_pg: rank 1 calls nccl:broadcast of [[8]] as collective number 5, where "
                "ranks 0, 2 call nccl:all_reduce of [[8]]"
            ],
        ),
        (  # they part before the last number
            {rank: _dump((4, "all_reduce", 8 if rank else 16), (5, "all_reduce", 8)) for rank in range(3)},
            [
                "group 0/default_pg: rank 0 calls nccl:all_reduce of [[16]] as collective number 4, where "
                "ranks 1-2 call nccl:all_reduce of [[8]]"
            ],
        ),
        (
            {0: _dump((4, "all_reduce", 8), (5, "all_reduce", 8)), 1: _dump((4, "all_reduce", 8))},
            [
                "rank 1 never called nccl:all_reduce number 5 of group 0/default_pg: "
                "its last was number 4, nccl:all_reduce, scheduled"
            ],
        ),
        ({rank: _dump((4, "all_gather", 8 + rank)) for rank in range(2)}, []),
        ({rank: _dump((4, "all_reduce", 8)) for rank in range(2)}, []),
        ({0: {}, 1: {"entries": None}}, []),
    ],
)
def test_flight_recorder_compares_operation_and_sizes(
    dumps: dict[int, dict[str, object]], sentences: list[str]
) -> None:
    assert list(stuck_collectives(dumps)) == sentences


def _what(rank: int, number: int, call: str, group: str) -> str:
    """Return the time-out as the exception that ends the process names it, with the process group."""
    said = _line(rank, number, call).partition("] [")[2]
    return f"  what():  [{group}Rank {rank}] Process group watchdog thread terminated with exception: [{said}"


_DP = "PG ID 1 PG GUID 1 "
_OTHER = "_ALLGATHER_BASE 64"


def _failure(rank: int, number: int, group: str = _DP) -> str:
    return (
        f"[rank{rank}]:[E704 09:15:00.2 ProcessGroupNCCL.cpp:2271] [{group}Rank {rank}]  failure detected by "
        f"watchdog at work sequence id: {number} PG status: last enqueued work: {number + 2}\n"
    )


@pytest.mark.parametrize(
    ("log", "confidence"),
    [
        # Each rank's group is named, on one line or another.
        (_line(4, 88, _OTHER, _DP) + _line(6, 88, _OTHER, _DP) + _line(1, 88, group=_DP), "high"),
        (
            _line(4, 88, _OTHER)
            + _failure(4, 88)
            + _line(6, 88, _OTHER)
            + _line(1, 88)
            + _what(1, 88, "ALLREDUCE 8", _DP),
            "high",
        ),
        (_line(4, 88, _OTHER) + _line(6, 88, _OTHER) + _line(1, 88), "high"),
        # One rank's alone.
        (_line(4, 88, _OTHER) + _failure(4, 88) + _line(6, 88, _OTHER) + _line(1, 88), "medium"),
        (_line(4, 88, _OTHER) + _line(6, 88, _OTHER) + _line(1, 88) + _failure(1, 88), "medium"),
        (_line(1, 88, group=_DP) + _line(4, 88, _OTHER) + _line(6, 88, _OTHER), "medium"),
        (_line(6, 88, _OTHER, _DP) + _line(4, 88, _OTHER) + _line(1, 88), "medium"),
    ],
)
def test_a_mismatch_is_seen_where_only_some_ranks_name_their_group(log: str, confidence: str) -> None:
    cause = explain_bytes(io.BytesIO(log.encode()), "log").cause
    assert cause is not None
    assert (cause.failure.id, cause.at.rank, cause.confidence) == ("collective-mismatch", 1, confidence)


@pytest.mark.parametrize(
    "log",
    [
        _line(4, 88, _OTHER, _DP) + _line(1, 88, group="PG ID 2 PG GUID 7 "),  # two groups
        _line(4, 88, _OTHER, _DP) + _line(1, 87),  # another number
        _line(4, 88, _OTHER, _DP) + _line(5, 88, group="PG ID 2 PG GUID 7 ") + _line(1, 88, "BROADCAST 8"),
        _line(4, 88, group=_DP) + _line(1, 88),
        _line(4, 88, "SEND 8", _DP) + _line(1, 88, "RECV 8"),
    ],
)
def test_ranks_that_may_be_of_different_groups_are_no_mismatch(log: str) -> None:
    assert _explained(log)[0] == "nccl-timeout"


@pytest.mark.parametrize(
    ("log", "sentences"),
    [
        (
            _line(3, 7) + "[rank12]: ncclRemoteError: A call failed\n",
            [
                "rank 12 reported another failure and no time-out, while rank 3 waited in collective "
                "number 7, ALLREDUCE: look there",
                "the log has no failure of ranks 0-2, 4-11, nor of any rank above 12: only their own logs "
                "tell where they were",
            ],
        ),
        (
            _line(0, 7) + "[rank1]: KeyboardInterrupt\n",
            [
                "rank 1 reported no time-out, while rank 0 waited in collective number 7, ALLREDUCE: "
                "look there first"
            ],
        ),
        (
            _line(0, 7) + _line(2, 7),
            [
                "the log has no failure of rank 1, nor of any rank above 2: only their own logs tell where "
                "they were"
            ],
        ),
        (_line(0, 7) + _line(1, 7) + _line(2, 7), []),
        (
            "[rank5]: OSError: [Errno 28] No space left on device\n" + _line(0, 7) + _line(1, 7),
            [
                "rank 5 reported another failure and no time-out, while ranks 0-1 waited in collective "
                "number 7, ALLREDUCE: look there",
                "the log has no failure of ranks 2-4, nor of any rank above 5: only their own logs tell "
                "where they were",
            ],
        ),
    ],
)
def test_sentences_on_ranks_are_complete(log: str, sentences: list[str]) -> None:
    assert _explained(log)[2] == sentences
