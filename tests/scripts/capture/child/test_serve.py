"""The child's side of the pipe: requests for traces in, files and answers out."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import LOOP
from torch import nn

from zerofit.core.allocation_log import Sharding, TraceRequest
from zerofit.core.capture import CapturedBatch, CapturedTensor
from zerofit.core.strategy import Lora, Precision
from zerofit.models.trace.cache import read_trace
from zerofit.models.trace.live import trace_live
from zerofit.models.trace.script_loss import ScriptLoss
from zerofit.scripts.capture.child.observations import Live
from zerofit.scripts.capture.child.serve import serve

_GIVEN: Any = ((torch.zeros(4, 3),), {})
_REQUEST = TraceRequest(sequence_length=1)


def _live(model: nn.Module) -> Live:
    batch = CapturedBatch(tensors=(CapturedTensor(name="", shape=(4, 3), dtype="float32"),))
    capture = dataclasses.replace(LOOP, batches=(batch,), lengths=None, micro_batch_size=4)
    return Live(model=model, batch=_GIVEN, capture=capture)


class _Asker:
    """The parent's side: a line out, a line in."""

    def __init__(self, live: Live) -> None:
        asks, self._asked = os.pipe()
        self._said, says = os.pipe()
        self.thread = threading.Thread(target=self._serve, args=(live, asks, says), daemon=True)
        self.thread.start()
        self._out = os.fdopen(self._asked, "w", encoding="utf-8")
        self._in = os.fdopen(self._said, "r", encoding="utf-8")

    def _serve(self, live: Live, asks: int, says: int) -> None:
        with (
            os.fdopen(asks, encoding="utf-8") as reader,
            os.fdopen(says, "w", encoding="utf-8") as writer,
            torch.no_grad(),
            torch.device("meta"),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            serve(live, reader, writer)

    def ask(self, line: str) -> dict[str, Any]:
        self._out.write(line + "\n")
        self._out.flush()
        answer: dict[str, Any] = json.loads(self._in.readline())
        return answer

    def close(self) -> None:
        self._out.close()
        self.thread.join(timeout=30)
        self._in.close()


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.GELU())


@pytest.fixture
def asker(net: nn.Module) -> Iterator[_Asker]:
    asker = _Asker(_live(net))
    yield asker
    asker.close()


def _line(request: TraceRequest, path: Path) -> str:
    return json.dumps({"request": dataclasses.asdict(request), "path": str(path)})


def test_each_request_is_answered_by_a_file_until_nobody_asks(
    asker: _Asker, net: nn.Module, tmp_path: Path
) -> None:
    for weights in (Precision.FP32, Precision.BF16):
        request = dataclasses.replace(_REQUEST, weights=weights, compute_capability=(9, 0))
        path = tmp_path / f"{weights}.trace"
        assert asker.ask(_line(request, path)) == {"ok": True}
        # neither the capture's default device nor its autocast or no_grad reach the trace
        assert read_trace(path, request) == trace_live(net, _GIVEN, request, has_tokens=False)
    asker.close()
    assert not asker.thread.is_alive()


def serve_alone() -> None:
    """Answer in a process of its own, as a script's."""
    serve(_live(nn.Sequential(nn.Linear(3, 2), nn.GELU())), sys.stdin, sys.stdout)


def test_fsdp2_is_traced_in_forks_of_the_script_time_and_again(tmp_path: Path) -> None:
    # Autograd runs in no fork of a process that has begun a thread for it, as other tests here may have.
    code = f"from {__name__} import serve_alone; serve_alone()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as script:
        assert script.stdin is not None
        assert script.stdout is not None

        def ask(request: TraceRequest, path: Path) -> Any:
            script.stdin.write(_line(request, path) + "\n")
            script.stdin.flush()
            return json.loads(script.stdout.readline())

        for resharded in (True, False):
            sharding = Sharding(shard_size=2, reshard_after_forward=resharded)
            request = dataclasses.replace(_REQUEST, sharding=sharding)
            found = []
            for name in ("1.trace", "2.trace"):
                assert ask(request, tmp_path / name) == {"ok": True}
                found.append(read_trace(tmp_path / name, request))
            assert found[0] == found[1] is not None
            assert found[0].logs[0].shards
        assert ask(_REQUEST, tmp_path / "3.trace") == {"ok": True}
    assert script.returncode == 0


class _Own:
    """A Trainer's compute_loss() with a module beside the model."""

    def __init__(self, net: nn.Module, *, fails: bool) -> None:
        self.model = net
        self.teacher = nn.Linear(3, 2)
        self.fails = fails

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.fails:
            raise RuntimeError("needs values")
        return (model(inputs) - self.teacher(inputs)).mean()


@pytest.mark.parametrize("fails", [False, True])
def test_a_trainers_own_loss_is_traced_and_left_out_with_a_note_where_that_fails(
    net: nn.Module, tmp_path: Path, fails: bool
) -> None:
    own = ScriptLoss(trainer=_Own(net, fails=fails), model=net)
    asker = _Asker(dataclasses.replace(_live(net), loss=own, inputs=_GIVEN[0][0]))
    for name in ("1.trace", "2.trace"):
        assert asker.ask(_line(_REQUEST, tmp_path / name)) == {"ok": True}
        trace = read_trace(tmp_path / name, _REQUEST)
        alone = trace_live(net, _GIVEN, _REQUEST, has_tokens=False)
        note = (
            "memory of _Own.compute_loss() beside the model is not counted: the model can't run on "
            "fake tensors: Sequential: RuntimeError: needs values"
        )
        assert trace is not None
        assert trace.notes == ((note,) if fails else ())
        assert (trace.logs == alone.logs) == fails
    asker.close()


def test_what_can_not_be_traced_is_an_answer_too(asker: _Asker, tmp_path: Path) -> None:
    request = dataclasses.replace(_REQUEST, attention="flash_attention_2", lora=Lora())
    said = asker.ask(_line(request, tmp_path / "1.trace"))["error"]
    assert (said["id"], set(said)) == (
        "flash-attention-needs-16-bit",
        {"id", "summary", "found", "why", "fix"},
    )
    assert asker.ask(_line(_REQUEST, tmp_path / "2.trace")) == {"ok": True}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("no json", "JSONDecodeError"),
        ('{"path": "/dev/null/x.trace", "request": {"sequence_length": 1}}', "OSError: nothing was written"),
    ],
)
def test_a_broken_request_ends_nothing(asker: _Asker, line: str, found: str) -> None:
    said = asker.ask(line)["error"]
    assert said["id"] == "trace-broken"
    assert found in said["found"]
    assert asker.thread.is_alive()
