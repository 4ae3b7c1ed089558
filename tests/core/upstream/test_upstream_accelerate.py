"""accelerate's state of a process that a capture runs in, in whichever release is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runs import run_command

_PROGRAM = """
import sys
import accelerate.state
from zerofit.core.upstream.accelerate import skip_data_parallel_wrapping

skip_data_parallel_wrapping(accelerate.state)
state = accelerate.state.PartialState(**eval(sys.argv[1]))
print(state.num_processes, state.process_index, state.device.type, state.distributed_type.value)
"""
_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize("arguments", [{}, {"cpu": True}, {"cpu": True, "backend": "gloo"}])
def test_the_only_process_is_not_one_of_several(arguments: dict[str, object], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    done = run_command((sys.executable, str(program), repr(arguments)), tmp_path, **_RANK)
    assert done.stdout.splitlines()[-1:] == ["1 0 cpu NO"], done.stderr
