"""Each file of a run folder, damaged in each way: every command answers, and names the other runs."""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from damaged_files import DAMAGES, damage, mend
from small_runs import NO_GPU, PLAN
from zerofit_in_process import run_in_process

from zerofit.checking.read_targets import probe_resumed
from zerofit.core.allocation_log import TraceRequest
from zerofit.core.checkpoints import MANIFEST_NAME, find_checkpoints, noted_checkpoints
from zerofit.core.plan import plan_to_json
from zerofit.core.rank_observation import LiveFile, Phase, read_observation
from zerofit.core.rank_record import read_record
from zerofit.machine.observations import read_observations
from zerofit.machine.rates import calibration_file, read_calibration
from zerofit.models.trace.cache import read_trace
from zerofit.scripts.capture.journal import Change, JournalEntry, append, append_read, stamp_of
from zerofit.scripts.capture.leftovers import CaptureFolder, clear_leftovers

_DAMAGED, _OTHER = "2026-01-02_00-00-00-train", "2026-01-01_00-00-00-train"
_COMMANDS = (
    ("runs", "list"),
    ("runs", "list", "--json"),
    ("runs", "status", _DAMAGED),
    ("runs", "status", "--json", _DAMAGED),
    ("runs", "status", _OTHER),
    ("runs", "logs", _DAMAGED),
    ("runs", "prune", "--dry-run", "--keep-last", "0"),
    ("runs", "cancel", _DAMAGED),
    ("explain", f"zerofit-runs/{_DAMAGED}"),
)
_FILES = (
    "run.json",
    "launcher.json",
    "plan.json",
    "job.json",
    "submitted.json",
    "command.sh",
    "checkpoints.jsonl",
    "ranks/rank0.json",
    "ranks/rank0.live",
    "logs/rank0.log",
)
_LIMIT_S = 20.0


def _make(folder: Path) -> None:
    """Make the folder of a run that has failed."""
    (folder / "logs").mkdir(parents=True)
    (folder / "plan.json").write_text(plan_to_json(PLAN))
    (folder / "command.sh").write_text("#!/bin/sh\naccelerate launch train.py\n")
    (folder / "checkpoints.jsonl").write_text('"/nowhere/checkpoint-1"\n')
    (folder / "logs" / "rank0.log").write_text("step 1 loss 2.0\nKeyError: 'labels'\n")
    times = {"started_at": "2026-01-01T00:00:00+00:00", "ended_at": "2026-01-01T01:00:00+00:00"}
    run = {**times, "exit_code": 1, "cause": "rank 0 exited with 1: KeyError", "kind": "error", "rank": 0}
    (folder / "run.json").write_text(json.dumps(run))
    process = psutil.Process()
    launcher = {"host": os.uname().nodename, "pid": process.pid, "started_at": process.create_time() - 1000}
    (folder / "launcher.json").write_text(json.dumps({**launcher, "noted_at": 1_790_000_000.5}))
    live = LiveFile(folder / "ranks", 0)
    now = time.time()
    live.write(Phase.FORWARD, (os.getpid(), 3, 10, 61, 500, 0, 0, 1), (now, 0.0, now - 4))
    (folder / "ranks" / "rank0.json").write_text(json.dumps({"rank": 0, "exit_code": 1, "changes": []}))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a place with two runs of this machine."""
    for name in (_OTHER, _DAMAGED):
        _make(tmp_path / "zerofit-runs" / name)
    return tmp_path


def _check_all(place: Path, what: str) -> None:
    """Check that each command ends with an answer."""
    for words in _COMMANDS:
        began = time.monotonic()
        with open(os.devnull, "wb") as nothing:  # a log is printed as it is, text or not
            stdout = nothing.fileno() if words[1] == "logs" else None
            done = run_in_process(words, cwd=place, environment={"PATH": "/nowhere"}, stdout=stdout)
        said = f"{what}: {words}: {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}"
        assert done.returncode in (0, 1, 2), said
        assert "Traceback (most recent" not in done.stderr + done.stdout, said
        assert time.monotonic() - began < _LIMIT_S, said
        if words[:2] == ("runs", "list"):
            assert done.returncode == 0, said
            assert _OTHER in done.stdout, said
        if "--json" in words and done.returncode == 0:
            json.loads(done.stdout)
        if words == ("runs", "status", _OTHER):
            assert "exit code 1: rank 0 exited with 1: KeyError" in done.stdout, said


def _cases() -> Iterator[object]:
    """Yield each file with some of the damages, all of them over the files, and with all as a slow test."""
    for number, name in enumerate(_FILES):
        some = [way for place, way in enumerate(DAMAGES) if place % 5 == number % 5]
        yield pytest.param(name, some, id=name)
        yield pytest.param(name, list(DAMAGES), id=f"{name}, each", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "ways"), [*_cases()])
def test_a_damaged_file_disables_no_command(place: Path, name: str, ways: list[str]) -> None:
    file = _made(place, name)
    whole = file.read_bytes()
    for way in ways:
        damage(file, way)
        _check_all(place, f"{name}, {way}")
        mend(file, whole)


def _made(place: Path, name: str) -> Path:
    """Return a file of the run's folder, of which those of a submitted job are made only here."""
    file = place / "zerofit-runs" / _DAMAGED / name
    if name == "submitted.json":
        job = {"engine": "slurm", "job_id": "7", "namespace": None}
        file.write_text(json.dumps(job))
    if name == "job.json":
        file.write_text(json.dumps({"engine": "slurm", "run": _DAMAGED}))
    return file


_SEEDS = 14
"""Of the bytes that are changed in a file."""


def _with_changed_bytes(data: bytes, seed: int) -> bytes:
    """Return a file with other bytes: by a fifth of all seeds one bit, by the others up to eight bytes."""
    chosen, changed = random.Random(seed), bytearray(data)
    for _ in range(1 if seed % 5 == 0 else chosen.randint(1, 8)):
        at = chosen.randrange(len(changed))
        changed[at] = changed[at] ^ 1 << chosen.randrange(8) if seed % 5 == 0 else chosen.randrange(256)
    return bytes(changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", _FILES)
def test_changed_bytes_or_another_files_disable_no_command(place: Path, name: str) -> None:
    file = _made(place, name)
    whole = file.read_bytes()
    others = [_made(place, other) for other in _FILES if other != name]
    contents = {f"bytes of seed {seed}": _with_changed_bytes(whole, seed) for seed in range(_SEEDS)}
    contents |= {f"as {other.name}": other.read_bytes() for other in others}
    for other in others:
        if other.name in ("submitted.json", "job.json"):
            other.unlink()
    for what, content in contents.items():
        file.write_bytes(content)
        _check_all(place, f"{name}, {what}")
        mend(file, whole)


_STRANGE_NAMES = (
    "2026-99-99_99-99-99-x/",
    "2026-02-30_00-00-00-train/",
    "0000-00-00_00-00-00-train/",
    f"{_DAMAGED}/requeue-3",
    f"{_DAMAGED}/recovery-1/",
    f"{_DAMAGED}/requeue-{'9' * 200}/",
    f"{_DAMAGED}/ranks/rankx.live",
    f"{_DAMAGED}/ranks/rank.live",
    f"{_DAMAGED}/ranks/rank{'9' * 200}.live",
    f"{_DAMAGED}/ranks/rank-1.live",
    f"{_DAMAGED}/launcher-nodex.json",
    f"{_DAMAGED}/ranks/nccl_trace_rank_\u00b2",
    f"{_DAMAGED}/logs/rank1.log/",
)


@pytest.mark.parametrize("name", _STRANGE_NAMES)
def test_a_file_of_a_strange_name_disables_no_command(place: Path, name: str) -> None:
    file = place / "zerofit-runs" / name.rstrip("/")
    if name.endswith("/"):
        file.mkdir(parents=True)
    else:
        file.write_text("{}")
    _check_all(place, name)


def test_a_damaged_record_is_listed_as_unreadable_and_kept(place: Path) -> None:
    folder = place / "zerofit-runs" / _DAMAGED
    (folder / "run.json").write_text('{"exit_code": "one"}')
    listed = run_in_process(("runs", "list"), cwd=place).stdout
    (line,) = (line for line in listed.splitlines() if _DAMAGED in line)
    assert " unreadable " in line
    status = run_in_process(("runs", "status", _DAMAGED), cwd=place).stdout
    assert "end:    unknown: its run.json can't be read" in status
    pruned = run_in_process(("runs", "prune", "--keep-last", "0"), cwd=place)
    assert f"kept {_DAMAGED}: its run.json can't be read" in pruned.stderr
    assert [path.name for path in (place / "zerofit-runs").glob("2*")] == [_DAMAGED]


@pytest.fixture
def big(place: Path) -> Iterator[Path]:
    """Return a log of a gigabyte, which takes no room."""
    file = place / "zerofit-runs" / _DAMAGED / "logs" / "rank0.log"
    with file.open("wb") as log:
        log.truncate(1 << 30)
    yield file
    file.unlink()


def test_a_log_is_printed_in_parts(big: Path) -> None:
    before = psutil.Process().memory_info().rss
    with open(os.devnull, "wb") as nothing:
        words = ("runs", "logs", "--run-dir", str(big.parents[2]), _DAMAGED)
        done = run_in_process(words, cwd=big.parent, stdout=nothing.fileno())
    assert done.returncode == 0
    assert psutil.Process().memory_info().rss - before < 100 << 20


def _left_capture(place: Path, name: str) -> Path:
    """Return a file of a capture whose zerofit was killed."""
    folder = CaptureFolder(place / "cache")
    append(folder.path, JournalEntry(change=Change.MADE, path=str(place / "made.txt")))
    append_read(folder.path, str(place), stamp_of(place.stat()))
    folder._owner.close()
    return folder.path / name


def _file(place: Path, name: str, text: str) -> Path:
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).write_text(text)
    return place / name


def _calibration(place: Path) -> Path:
    return calibration_file(NO_GPU, environ={"XDG_CACHE_HOME": str(place)})


_REQUEST = TraceRequest(sequence_length=16)
_READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "a capture's journal": (
        lambda place: _left_capture(place, "files.jsonl"),
        lambda place: clear_leftovers(place / "cache"),
    ),
    "the files that a capture read": (
        lambda place: _left_capture(place, "read.jsonl"),
        lambda place: clear_leftovers(place / "cache"),
    ),
    "a capture's owner": (
        lambda place: _left_capture(place, "owner.json"),
        lambda place: clear_leftovers(place / "cache"),
    ),
    "a trace": (
        lambda place: _file(place, "x.trace", zlib.compress(b"[[], []]", 0).decode("latin-1")),
        lambda place: read_trace(place / "x.trace", _REQUEST),
    ),
    "an observation": (
        lambda place: _file(place, "zerofit/observations/x.json", '{"at": "2026-01-01T00:00:00"}'),
        lambda place: read_observations(environ={"XDG_CACHE_HOME": str(place)}),
    ),
    "a calibration": (
        lambda place: _file(place, str(_calibration(place).relative_to(place)), '{"rates": []}'),
        lambda place: read_calibration(NO_GPU, environ={"XDG_CACHE_HOME": str(place)}),
    ),
    "a manifest": (
        lambda place: _file(place, f"checkpoint-1/{MANIFEST_NAME}", '{"version": 1, "saved_at": 1.0}'),
        find_checkpoints,
    ),
    "the notes of checkpoints": (
        lambda place: _file(place, "checkpoints.jsonl", '"/nowhere"\n'),
        noted_checkpoints,
    ),
    "latest": (
        lambda place: _file(place, "latest", "global_step1"),
        lambda place: probe_resumed(("--resume_from_checkpoint", str(place))),
    ),
    "a rank's record": (
        lambda place: _file(place, "rank0.json", '{"rank": 0, "exit_code": 1, "changes": []}'),
        lambda place: read_record(place, 0),
    ),
    "a rank's state": (
        lambda place: _file(place, "rank0.live", "x" * 5000),
        lambda place: read_observation(place, 0),
    ),
}


@pytest.mark.parametrize("way", DAMAGES)
@pytest.mark.parametrize("name", _READERS)
def test_a_damaged_file_stops_none_of_its_readers(tmp_path: Path, name: str, way: str) -> None:
    make, read = _READERS[name]
    damage(make(tmp_path), way)
    began = time.monotonic()
    read(tmp_path)
    assert time.monotonic() - began < _LIMIT_S
