"""Traces made at one time, by a process and its forks, are those of one process."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_traces import tiny

from zerofit.core.allocation_log import TraceRequest
from zerofit.models.find import probe_model
from zerofit.models.trace.ahead import trace_ahead
from zerofit.models.trace.cache import read_trace
from zerofit.models.trace.entry import cached_at, trace_here

_REQUEST = TraceRequest(sequence_length=16)
_REFUSED = replace(_REQUEST, attention="flash_attention_2")
_PROGRAM = """
import base64, json, os, pickle, sys
from pathlib import Path
from zerofit.models.find import probe_model
from zerofit.models.trace import ahead

requests, forks = pickle.loads(base64.b64decode(sys.argv[4])), []
fork = ahead.fork
def counted():
    forks.append(fork())
    return forks[-1]
ahead.fork = counted
os.sched_getaffinity = lambda _: set(range(int(sys.argv[3])))
ahead.trace_ahead(probe_model(sys.argv[1]), requests, cache_folder=Path(sys.argv[2]))
print(json.dumps(len(forks)))
"""
_REQUESTS = (_REQUEST, replace(_REQUEST, gradient_checkpointing=True), _REFUSED, _REQUEST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cores", "num_forks"),
    [(2, 1), (1, 0), (8, 2)],
)
def test_the_cache_has_what_one_process_would_write(cores: int, num_forks: int, tmp_path: Path) -> None:
    config, _ = tiny("llama", 2)
    config.save_pretrained(tmp_path / "llama")
    named = probe_model(str(tmp_path / "llama"))
    cache = tmp_path / "traces"
    asked = base64.b64encode(pickle.dumps(_REQUESTS)).decode()
    program = [sys.executable, "-c", _PROGRAM, str(tmp_path / "llama"), str(cache), str(cores), asked]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout) == num_forks, done.stderr
    written = {request: read_trace(cached_at(cache, named, request), request) for request in _REQUESTS}
    made = {request: trace_here(named, request) for request in _REQUESTS if request is not _REFUSED}
    assert written == {**(made if num_forks else dict.fromkeys(made)), _REFUSED: None}


_WITHOUT_TRACES = """
import logging, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from zerofit.core.allocation_log import TraceRequest
from zerofit.models.trace import ahead

case, folder, parent = sys.argv[1], Path(sys.argv[2]), os.getpid()

class Locked:
    def write(self, *_):
        time.sleep(0 if os.getpid() == parent else 600)
    flush = isatty = write

def trace(source, requests, cache_folder):
    name = "parent" if os.getpid() == parent else "fork"
    if case == "stopped" and name == "parent":
        raise KeyboardInterrupt
    if case == "stopped":
        time.sleep(600)
    if name == "fork":
        print("a warning", file=sys.stderr)
        logging.getLogger("transformers").error("an error")
    (folder / name).touch()

def no_fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")

ahead._trace, ahead._LIBRARIES, ahead.cached_at = trace, (), lambda *_: Path("/none")
ahead.fork = no_fork if case == "none" else ahead.fork
os.sched_getaffinity = lambda _: {0, 1}
sys.modules["torch"] = SimpleNamespace(set_num_threads=lambda _: None)
requests = [TraceRequest(sequence_length=length) for length in (8, 16)]
error = sys.stderr
if case == "locked":
    sys.stderr = Locked()
    logging.basicConfig(stream=sys.stderr)
try:
    ahead.trace_ahead(None, requests, cache_folder=folder)
except KeyboardInterrupt:
    (folder / "interrupted").touch()
sys.stderr = error
"""


@pytest.mark.parametrize(
    ("case", "done"),
    [("stopped", {"interrupted"}), ("locked", {"parent", "fork"}), ("none", {"parent"})],
)
def test_forks_are_waited_for_only_while_they_are_needed(case: str, done: set[str], tmp_path: Path) -> None:
    program = [sys.executable, "-c", _WITHOUT_TRACES, case, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == done


def test_a_process_that_has_traced_does_not_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("zerofit.models.trace.ahead.fork", lambda: pytest.fail("forked"))
    config, _ = tiny("llama", 1)
    config.save_pretrained(tmp_path / "llama")
    named = probe_model(str(tmp_path / "llama"))
    trace_here(named, _REQUEST)
    trace_ahead(named, _REQUESTS, cache_folder=tmp_path)
    assert not list(tmp_path.glob("*.trace"))
