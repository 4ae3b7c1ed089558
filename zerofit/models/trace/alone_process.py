"""The process that alone.py starts: it traces what standard input asks for into the file of its argument."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

from zerofit.core.errors import UserError
from zerofit.models.trace.cache import write_trace
from zerofit.models.trace.entry import trace_here

_FIELDS = ("summary", "found", "why", "fix")


def main() -> None:
    """Write the trace, or beside it why there is none."""
    source, request = pickle.loads(sys.stdin.buffer.read())
    file = Path(sys.argv[1])
    try:
        write_trace(file, trace_here(source, request))
    except UserError as error:
        fields = {name: getattr(error, name) for name in _FIELDS}
        file.with_suffix(".json").write_text(json.dumps({"id": error.rule, **fields}), "utf-8")
    sys.stdout.flush()
    os._exit(0)  # without the interpreter's last collection


if __name__ == "__main__":
    main()
