"""The process that alone.py starts: it traces what its input's lines ask for, each in a fork.

Usage: python -m zerofit.models.trace.alone_process PARENT, with the process id of the one that asks.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.processes import end_with_parent
from zerofit.models.trace.alone import error_of, serve_forks, untraced
from zerofit.models.trace.cache import write_trace
from zerofit.models.trace.entry import trace_here

_LIBRARIES = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.testing._internal.distributed.fake_pg",
    "torch._subclasses.fake_tensor",
    "transformers.modeling_utils",
    "accelerate.utils.fsdp_utils",
)
"""What every trace imports."""


def main() -> None:
    """Answer requests on standard output, to which nothing else may write."""
    end_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for name in _LIBRARIES:
        importlib.import_module(name)
    serve_forks(_answer, sys.stdin, answers)


def _answer(line: str) -> dict[str, Any]:
    """Write the trace into the request's file, and return {"ok": True}, or an error's fields."""
    fields = json.loads(line)
    source, request = pickle.loads(base64.b64decode(fields["asked"]))
    try:
        write_trace(Path(fields["path"]), trace_here(source, request))
    except UserError as error:
        return error_of(error)
    except Exception as error:
        traceback.print_exc()
        return error_of(untraced(f"{type(error).__name__}: {str(error).strip()[:200]}"))
    return {"ok": True}


if __name__ == "__main__":
    main()
