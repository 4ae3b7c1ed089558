"""Explains a zerofit run by its folder: logs, records, NCCL's flight recorder, and the last good run."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from zerofit.launching.diagnose import EndKind
from zerofit.launching.explain import EvidenceLine, Explanation, LoggedFailure, explain_logs, logs_in
from zerofit.launching.failures import GPU_IS_FULL, HOST_IS_FULL, Role, failure_of, failures
from zerofit.launching.run_folder import attempts, document_in, was_killed

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
    run = document_in(last / "run.json")
    if run.get("exit_code") == 0:
        return RunExplanation(
            explanation=Explanation(cause=None, others=(), num_lines=0, files=("run.json",))
        )
    logs = [path for path in logs_in(folder, or_none=True) if last in path.parents]
    explanation = explain_logs(logs, root=folder)
    good = _last_good_run(folder)
    return RunExplanation(
        explanation=_with_verdict(explanation, run),
        sentence=run.get("cause") if run else was_killed(folder),
        good_run=None if good is None else good.name,
        differences=() if good is None else tuple(_differences(good, last))[:_MOST_DIFFERENCES],
        collectives=tuple(stuck_collectives(_dumps(last / "ranks"))) or explanation.waits,
    )


def _with_verdict(explanation: Explanation, run: Mapping[str, Any]) -> Explanation:
    """Return the explanation with the launch's own cause, if the logs show no other root cause."""
    kind, sentence = run.get("kind"), str(run.get("cause"))
    failure = failure_of(sentence, ends_traceback=False)
    if failure is None or failure.role is Role.CASCADE:
        name = _FAILURE_OF_KIND.get(EndKind(kind)) if kind in list(EndKind) else None
        failure = failures()[name] if name else None
    cause = explanation.cause
    if failure is None or (cause is not None and cause.failure.role is Role.ROOT):
        return explanation
    at = EvidenceLine(file="run.json", line=1, text=sentence, rank=run.get("rank"))
    others = (*((cause,) if cause else ()), *explanation.others)
    return Explanation(
        cause=LoggedFailure(failure=failure, at=at),
        others=others,
        num_lines=explanation.num_lines,
        files=explanation.files,
    )


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
            and document_in(other / "run.json").get("exit_code") == 0
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
        if rank.isdigit():
            with open(path, "rb") as file:
                found[int(rank)] = read_dump(file)
    return dict(sorted(found.items()))


def stuck_collectives(dumps: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each process group whose ranks are at different collectives.

    Args:
        dumps: by rank, as written by torch/csrc/distributed/c10d/FlightRecorder.hpp.
    """
    groups: dict[str, dict[int, tuple[int, str, str]]] = {}
    for rank, dump in dumps.items():
        entries: Sequence[Mapping[str, Any]] = dump.get("entries") or ()
        for entry in entries:
            if entry.get("is_p2p"):
                continue
            group = "/".join(map(str, entry.get("process_group") or ("default",)))
            at = (
                int(entry.get("collective_seq_id", 0)),
                str(entry.get("profiling_name")),
                str(entry.get("state")),
            )
            groups.setdefault(group, {})[rank] = max(groups.get(group, {}).get(rank, (0, "", "")), at)
    for group, ranks in groups.items():
        last, name, _ = max(ranks.values())
        behind = {rank: at for rank, at in ranks.items() if at[0] < last}
        for rank, (number, own, state) in sorted(behind.items()):
            yield (
                f"rank {rank} never called {name} number {last} of group {group}: "
                f"its last was number {number}, {own}, {state}"
            )
        if not behind and len({at[1] for at in ranks.values()}) > 1:
            calls = ", ".join(f"rank {rank} calls {at[1]}" for rank, at in sorted(ranks.items()))
            yield f"number {last} of group {group} differs: {calls}"
