"""serve: answers trace requests for a captured model until the parent closes the connection."""

from __future__ import annotations

import json
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.upstream.torch import set_device_guard
from zerofit.models.trace.alone import Forks, error_of
from zerofit.models.trace.cache import write_trace
from zerofit.models.trace.live import trace_live
from zerofit.models.trace.script_loss import ScriptLoss

if TYPE_CHECKING:
    from zerofit.core.allocation_log import Trace
    from zerofit.scripts.capture.child.observations import Live


def serve(live: Live, reader: TextIO, writer: TextIO) -> None:
    """Answer each request line by one line, up to the end of the file; those of FSDP2 in forks.

    A request is {"request": the fields of a TraceRequest, "path": the file to write}; its answer is
    {"ok": true}, or {"error": {"id", "summary", "found", "why", "fix"}}.
    """
    set_device_guard()
    answer = partial(_in_new_thread, live)
    with closing(Forks(answer)) as forks:
        for line in reader:
            answered = forks.answer(line) if _is_sharded(line) else answer(line)
            writer.write(json.dumps(answered) + "\n")
            writer.flush()


def _is_sharded(line: str) -> bool:
    """Return True if a request line wants FSDP2."""
    try:
        return json.loads(line)["request"].get("sharding") is not None
    except (ValueError, LookupError):
        return False


def _in_new_thread(live: Live, line: str) -> dict[str, Any]:
    """Return the answer of a thread without the modes of script and capture: autocast, gradients off."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_answer, live, line).result()


def _answer(live: Live, line: str) -> dict[str, Any]:
    try:
        asked = json.loads(line)
        path = Path(asked["path"])
        write_trace(path, _trace(live, asked["request"]))
        if not path.exists():
            raise OSError(f"nothing was written to {path}")
    except UserError as error:
        return error_of(error)
    except Exception as error:
        return {"error": _unexpected(error)}
    return {"ok": True}


def _trace(live: Live, fields: dict[str, Any]) -> Trace:
    from pydantic import TypeAdapter

    capture = live.capture
    request = TypeAdapter(TraceRequest).validate_json(json.dumps(fields))
    traced = partial(
        trace_live,
        live.model,
        request=request,
        has_tokens=capture.lengths is not None,
        has_samples=capture.micro_batch_size is not None,
        micro_batch_size=capture.micro_batch_size,
    )
    if request.evaluates:
        return _trace_of_evaluation(live, request)
    if live.loss is not None:
        try:
            return traced(((live.inputs,), {}), loss=live.loss)
        except Exception as error:  # from the script's own loss, which may need values
            said = f"{type(error).__name__}: {error}"
            if isinstance(error, UserError):
                said = f"{error.summary}: {error.found}"
            name = type(live.loss.trainer).__name__
            live.note = f"memory of {name}.compute_loss() beside the model is not counted: {said[:300]}"
            live.loss = None
    trace = traced(live.batch)
    return replace(trace, notes=(live.note,) if live.note else ())


def _trace_of_evaluation(live: Live, request: TraceRequest) -> Trace:
    """Return the trace of the batch that the Trainer evaluates.

    Raises:
        UserError: the script's own code can't run on tensors without values.
    """
    evaluation = live.capture.evaluation
    assert evaluation is not None
    loss = ScriptLoss(trainer=live.trainer, model=live.model, keeps_predictions=evaluation.keeps_predictions)
    return trace_live(
        live.model,
        ((live.evaluated,), {}),
        request=request,
        has_tokens=evaluation.lengths is not None,
        has_samples=live.capture.micro_batch_size is not None,
        micro_batch_size=evaluation.batch_size,
        loss=loss,
    )


def _unexpected(error: Exception) -> dict[str, str]:
    place = traceback.extract_tb(error.__traceback__)[-1]
    said = (str(error).strip().splitlines() or [""])[0]
    return {
        "id": "trace-broken",
        "summary": "zerofit failed to trace the script's model",
        "found": f"{type(error).__name__}: {said[:200]}   ({Path(place.filename).name}:{place.lineno})",
        "why": "this is a bug in zerofit, or an unusual model",
        "fix": "report it, and launch with an explicit strategy, such as --zero-stage 2",
    }
