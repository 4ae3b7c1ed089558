"""Explains a zerofit run by its folder: logs, records, NCCL's flight recorder, and the last good run."""

from __future__ import annotations

import contextlib
import pickle
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from zerofit.core.bounded_read import open_regular
from zerofit.launching.collectives import Collective, has_same_sizes, mismatch_in
from zerofit.launching.diagnose import EndKind
from zerofit.launching.explain import Explanation, LoggedFailure, explain_logs, logs_in
from zerofit.launching.failures import GPU_IS_FULL, HOST_IS_FULL, Role, failure_of, failures
from zerofit.launching.next_step import restart_words
from zerofit.launching.run_folder import RunRecord, attempts, document_in, run_record, was_killed
from zerofit.launching.timeline import EvidenceLine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TRACE_PREFIX = "nccl_trace_rank_"
"""Prefix of a rank's NCCL flight recorder dump in the run's ranks/ folder."""
_FAILURE_OF_KIND = {
    EndKind.GPU_OUT_OF_MEMORY: GPU_IS_FULL,
    EndKind.HOST_OUT_OF_MEMORY: HOST_IS_FULL,
    EndKind.HANG: "hang",
    EndKind.REFUSED: "zerofit-refused",
    EndKind.SIGNAL: "cancelled",
}
"""The catalog's failure for an end of `zerofit launch` whose sentence shows none."""
_COMPARED = ("strategy", "workload", "topology", "machine", "versions")
"""Parts of plan.json to compare between runs."""
_MOST_DIFFERENCES = 8
_TIMED_NAME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-(.+?)(-\d+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExplanation:
    """Why a run of zerofit failed."""

    explanation: Explanation
    sentence: str | None = None
    """The cause reported by `zerofit launch`; None if the run succeeded."""
    restart: str | None = None
    """The command that starts the run again, if zerofit itself was killed."""
    good_run: str | None = None
    """Name of the last successful run of the same script; None if there is none."""
    differences: tuple[str, ...] = ()
    """Differences from that run, in words."""
    collectives: tuple[str, ...] = ()
    """Progress of the ranks' collectives, from NCCL's flight recorder or watchdog."""


def is_run_folder(folder: Path) -> bool:
    """Return True if a folder is a run folder of `zerofit launch`."""
    return (folder / "plan.json").is_file() and (folder / "command.sh").is_file()


def explain_run(folder: Path) -> RunExplanation:
    """Return why a run failed; if it was restarted by a recovery or a requeue, why its last start did."""
    last = [folder, *filter(is_run_folder, attempts(folder)[1:])][-1]
    run = run_record(last / "run.json")
    if run is not None and run.exit_code == 0:
        return RunExplanation(
            explanation=Explanation(cause=None, others=(), num_lines=0, files=("run.json",))
        )
    logs = [path for path in logs_in(folder, or_none=True) if last in path.parents]
    topology = document_in(last / "plan.json").get("topology")
    is_one_rank = isinstance(topology, dict) and topology.get("world_size") == 1
    explanation = explain_logs(logs, root=folder, is_one_rank=is_one_rank)
    good = _last_good_run(folder)
    return RunExplanation(
        explanation=_with_verdict(explanation, run),
        sentence=was_killed(folder) if run is None else run.cause,
        restart=restart_words(last) if run is None and was_killed(folder) else None,
        good_run=None if good is None else good.name,
        differences=() if good is None else tuple(_differences(good, last))[:_MOST_DIFFERENCES],
        collectives=tuple(stuck_collectives(_dumps(last / "ranks"))) or explanation.waits,
    )


def _with_verdict(explanation: Explanation, run: RunRecord | None) -> Explanation:
    """Return the explanation with the launch's own cause, if the logs show no other root cause."""
    if run is None:
        return explanation
    kind, sentence = run.kind, str(run.cause)
    failure = failure_of(sentence, ends_traceback=False)
    if failure is None or failure.role is Role.CASCADE:
        name = _FAILURE_OF_KIND.get(EndKind(kind)) if kind in list(EndKind) else None
        failure = failures()[name] if name else None
    cause = explanation.cause
    if failure is None or (cause is not None and cause.failure.role is Role.ROOT):
        return explanation
    at = EvidenceLine(file="run.json", line=1, text=sentence, rank=run.rank)
    others = (*((cause,) if cause else ()), *explanation.others)
    return replace(explanation, cause=LoggedFailure(failure=failure, at=at), others=others, waits=())


def _last_good_run(folder: Path) -> Path | None:
    """Return the newest earlier successful run of the same script."""
    own = _TIMED_NAME.fullmatch(folder.name)
    if own is None:
        return None
    for other in sorted(folder.parent.iterdir(), reverse=True):
        name = _TIMED_NAME.fullmatch(other.name)
        if (
            name is not None
            and name[1] == own[1]
            and other.name < folder.name
            and (run := run_record(other / "run.json")) is not None
            and run.exit_code == 0
        ):
            return other
    return None


def _differences(good: Path, bad: Path) -> Iterator[str]:
    """Yield the differences between the plans and commands of two runs, in words."""
    before, now = document_in(good / "plan.json"), document_in(bad / "plan.json")
    for part in _COMPARED:
        old, new = dict(_leaves(before.get(part), part)), dict(_leaves(now.get(part), part))
        for name in dict.fromkeys((*old, *new)):
            if old.get(name) != new.get(name):
                yield f"{name}: {old.get(name, 'unset')} then, {new.get(name, 'unset')} now"


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{name}[{number}]")
    elif not (name.startswith("machine") and "free" in name):  # which differs between any two runs
        yield name, value


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles plain values only: a dump may come from anywhere."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


def read_dump(file: IO[bytes]) -> dict[str, Any]:
    """Return a dump of NCCL's flight recorder; empty if it is none."""
    try:
        found = _PlainUnpickler(file).load()
    except Exception:  # a truncated or foreign file may raise anything
        return {}
    return found if isinstance(found, dict) else {}


def _dumps(ranks: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in ranks.glob(f"{TRACE_PREFIX}*"):
        rank = path.name.removeprefix(TRACE_PREFIX)
        if re.fullmatch(r"[0-9]{1,6}", rank):
            with contextlib.suppress(OSError), open_regular(path) as file:
                found[int(rank)] = read_dump(file)
    return dict(sorted(found.items()))


def stuck_collectives(dumps: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each process group whose ranks are at different collectives.

    Args:
        dumps: by rank, as written by torch/csrc/distributed/c10d/FlightRecorder.hpp.
    """
    groups: dict[str, dict[int, dict[int, tuple[Collective, str]]]] = {}
    for rank, dump in dumps.items():
        entries: Sequence[Mapping[str, Any]] = dump.get("entries") or ()
        for entry in entries:
            if not entry.get("is_p2p"):
                group = "/".join(map(str, entry.get("process_group") or ("default",)))
                call = _collective(entry, group)
                groups.setdefault(group, {}).setdefault(call.number, {})[rank] = call, str(entry.get("state"))
    for group, numbers in groups.items():
        at = (
            mismatch_in({rank: call for rank, (call, _) in numbers[number].items()})
            for number in sorted(numbers)
        )
        if (mismatch := next(filter(None, at), None)) is not None:
            yield f"group {group}: {mismatch.sentence}"
        last = max(numbers)
        latest = {rank: called[rank] for _, called in sorted(numbers.items()) for rank in called}
        name = next(call.operation for call, _ in latest.values() if call.number == last)
        for rank, (own, state) in sorted(latest.items()):
            if own.number < last:
                yield (
                    f"rank {rank} never called {name} number {last} of group {group}: "
                    f"its last was number {own.number}, {own.operation}, {state}"
                )


def _collective(entry: Mapping[str, Any], group: str) -> Collective:
    operation, sizes = str(entry.get("profiling_name")), entry.get("input_sizes")
    return Collective(
        group=group,
        number=int(entry.get("collective_seq_id", 0)),
        operation=operation,
        sizes=f"{sizes}" if sizes and has_same_sizes(operation) else None,
    )
