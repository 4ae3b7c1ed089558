"""Stands in for the capturing process in tests: the real guard, and training where the script says so.

A script imports `training` and calls begin(); it says how requests for traces are answered.
"""

import json
import os
import runpy
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "support"))
from captures import LOOP, with_model

from zerofit.core.allocation_log import AllocationLog, Storages, Trace, TraceRequest
from zerofit.core.capture import capture_to_json
from zerofit.models.trace.cache import write_trace
from zerofit.scripts.capture.child.files import guard

_CAPTURE = with_model(LOOP, name="made")
_LOG = AllocationLog(
    least_micro_batch_size=1,
    modules=("",),
    module_parameters=((),),
    parameters=(),
    buffer_bytes=(),
    storages=Storages(kinds=(), fixed_bytes=(), bytes_per_sample=(), modules=(), operators=()),
    operators=(),
    codes=b"",
    arguments=(),
    gradient_storages=(),
    costs=(),
)


def _leave(folder: Path, name: str, text: str) -> None:
    (folder / "unfinished").write_text(text)
    os.replace(folder / "unfinished", folder / name)


def _serve(spec: dict, answer: str) -> None:
    reader, writer = spec["serve"]
    with os.fdopen(reader) as asked, os.fdopen(writer, "w", buffering=1) as said:
        for line in asked:
            if answer == "dies":
                os._exit(1)
            if answer == "hangs":
                time.sleep(600)
            if answer == "is late":
                time.sleep(0.6)
            if answer == "refuses":
                told = {"id": "trace-odd", "summary": "it can't", "found": "this", "why": "that", "fix": "so"}
                said.write(json.dumps({"error": told}) + "\n")
                continue
            trace = Trace(request=TraceRequest(sequence_length=8), logs=(_LOG,))
            write_trace(Path(json.loads(line)["path"]), trace)
            said.write('{"ok": true}\n')


def main() -> None:
    folder, *target = sys.argv[1:]
    place = Path(folder)
    spec = json.loads((place / "spec.json").read_text())
    training = types.ModuleType("training")

    def begin(answer: str = "traces", **fields: object) -> None:
        _leave(place, "capture.json", capture_to_json(replace(_CAPTURE, target=tuple(target), **fields)))
        _serve(spec, answer)
        os._exit(0)

    def fail(kind: str, **told: object) -> None:
        document = {"kind": kind, "message": "it failed", "where": "train.py:1", **told}
        _leave(place, "failure.json", json.dumps(document))
        os._exit(0)

    training.begin, training.fail, training.weights = begin, fail, spec["weights"]
    sys.modules["training"] = training
    denied_path = guard(place)
    sys.argv = target
    sys.path[0] = str(Path(target[0]).resolve().parent)
    try:
        runpy.run_path(target[0], run_name="__main__")
    except OSError as error:
        if path := denied_path(error):
            fail("confined", path=path)
        raise


main()
