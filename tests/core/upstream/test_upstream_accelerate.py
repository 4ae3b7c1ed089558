"""accelerate's state of a process that a capture runs in, in whichever release is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import os, sys
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import accelerate.state
from zerofit.core.upstream.accelerate import skip_data_parallel_wrapping

skip_data_parallel_wrapping(accelerate.state)
state = accelerate.state.PartialState(**eval(sys.argv[1]))
print(state.num_processes, state.process_index, state.device.type, state.distributed_type.value)
"""


@pytest.mark.parametrize("arguments", [{}, {"cpu": True}, {"cpu": True, "backend": "gloo"}])
def test_the_only_process_is_not_one_of_several(arguments: dict[str, object]) -> None:
    command = [sys.executable, "-c", _PROGRAM, repr(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["1 0 cpu NO"], done.stderr
