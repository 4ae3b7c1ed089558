"""Traces of FSDP2 are made in forks: of a process that has the libraries, or of a captured script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tiny_traces import tiny

from zerofit.core.allocation_log import Sharding, TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.module_path import OWN_PROGRAM
from zerofit.core.processes import wait_for_end
from zerofit.core.strategy import Lora, Precision, Quantization
from zerofit.models.find import probe_model
from zerofit.models.trace import alone
from zerofit.models.trace.alone import Forks, trace_alone
from zerofit.models.trace.entry import trace_here

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zerofit.models.source import ModelSource

_TWO = Sharding(shard_size=2)
_REQUEST = TraceRequest(sequence_length=16, sharding=_TWO)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Return a small model in a folder."""
    folder = tmp_path_factory.mktemp("llama")
    config, _ = tiny("llama", 4)
    config.save_pretrained(folder)
    return probe_model(str(folder))


@pytest.mark.slow
def test_many_traces_in_a_row_are_those_of_a_process_of_their_own(named: ModelSource) -> None:
    qlora = replace(_REQUEST, weights=Precision.BF16, lora=Lora(rank=2), quantization=Quantization.NF4)
    requests = [
        _REQUEST,
        replace(_REQUEST, gradient_checkpointing=True),
        replace(_REQUEST, sharding=replace(_TWO, reshard_after_forward=False)),
        replace(_REQUEST, sharding=replace(_TWO, cpu_offload=True)),
        replace(qlora, packing=replace(qlora.packing, stored_in=Precision.BF16)),
    ]
    first = [trace_alone(named, request) for request in requests]
    process = alone._started[-1]
    assert [trace_alone(named, request) for request in requests] == first
    assert alone._started == [process]
    assert first[0] == trace_here(named, _REQUEST)
    assert len({trace.logs for trace in first}) == len(requests)


@pytest.mark.slow
def test_what_the_model_or_the_request_lacks_is_the_tracers_own_error(named: ModelSource) -> None:
    with pytest.raises(UserError) as raised:
        trace_alone(named, replace(_REQUEST, attention="flash_attention_2"))
    assert raised.value.rule == "flash-attention-needs-16-bit"
    assert trace_alone(named, _REQUEST).logs


@pytest.mark.slow
def test_a_process_that_was_killed_is_started_again(named: ModelSource) -> None:
    before = trace_alone(named, _REQUEST)
    alone._started[-1]._process.kill()
    alone._started[-1]._process.wait()
    assert trace_alone(named, _REQUEST) == before


def test_a_process_that_can_not_import_the_libraries_says_why(
    named: ModelSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(alone, "_started", [])
    with pytest.raises(UserError) as raised:
        trace_alone(named, _REQUEST)
    assert (raised.value.rule, raised.value.found) == (
        "trace-failed",
        "the tracing process ended with 1: ImportError: libcudart.so.12: cannot open shared object file",
    )


def _answer(line: str) -> dict[str, Any]:
    asked = json.loads(line)
    if asked == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if asked == "raise":
        raise MemoryError
    if asked == "chat":
        print("not an answer")
    return {"asked": asked, "from": os.getpid()}


@pytest.fixture
def forks() -> Iterator[Forks]:
    forks = Forks(_answer)
    yield forks
    forks.close()


def test_each_answer_comes_from_a_fork_of_its_own(forks: Forks) -> None:
    answers = [forks.answer(json.dumps(word)) for word in ("a", "chat", "ü", "b")]
    assert [answer["asked"] for answer in answers] == ["a", "chat", "ü", "b"]
    assert len({answer["from"] for answer in answers} | {os.getpid()}) == 5


@pytest.mark.parametrize(("word", "how"), [("die", "by SIGKILL"), ("raise", "with 1")])
def test_a_fork_that_dies_is_an_error_and_the_next_one_answers(forks: Forks, word: str, how: str) -> None:
    error = forks.answer(json.dumps(word))["error"]
    assert (error["id"], error["found"]) == ("trace-failed", f"the tracing process ended {how}")
    assert forks.answer('"a"')["asked"] == "a"


def test_the_forks_hold_no_file_of_the_script_open_and_end_with_it() -> None:
    reader, writer = os.pipe()
    forks = Forks(_answer)
    pid = forks.answer('"a"')["from"]
    os.close(writer)
    assert os.read(reader, 1) == b""  # nobody else has its other end
    forks.close()
    until = time.monotonic() + 10
    while time.monotonic() < until and os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")
    os.close(reader)


_STANDS = """
import os, sys, time
from zerofit.models.trace.alone import serve_forks
serve_forks(lambda _: (print(os.getpid(), flush=True), time.sleep(600)), sys.stdin, sys.stdout)
"""


def test_no_trace_outlives_the_process_that_waits_for_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STANDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdin is not None
        assert serving.stdout is not None
        serving.stdin.write("line\n")
        serving.stdin.flush()
        fork = psutil.Process(int(serving.stdout.readline()))
        serving.kill()
        assert wait_for_end([fork], within_s=120) == []


def test_a_tracing_process_whose_plan_has_ended_ends_at_once() -> None:
    of_another = [*OWN_PROGRAM, "zerofit.models.trace.alone_process", "1"]
    ended = subprocess.run(of_another, stdin=subprocess.PIPE, capture_output=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"")
