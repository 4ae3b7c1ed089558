"""The inside of a DeepSpeedEngine, in whichever release is installed."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import run_command

from zerofit.core.upstream.deepspeed import wait_for_every_gather

_PROGRAM = Path(__file__).with_name("engine_program.py")


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("way", ["own", "older"])
def test_a_step_has_the_gradients_of_all_passes_though_none_was_known_to_be_the_last(
    stage: int, way: str, tmp_path: Path
) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    done = run_command((sys.executable, str(_PROGRAM), str(stage), way), tmp_path, **ranks, **place)
    assert done.stdout.splitlines()[-1:] == ["2 [False] [11.0]"], done.stderr


class _Handle:
    """Stands for a gather of gloo, whose tensor is filled when it is waited for, and no sooner."""

    def __init__(self, tensor: list[int]) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        self._tensor[:] = [1]


class _Older:
    """Stands for Init of releases that wait for the last gather alone; newer ones wait for all."""

    def _allgather_params_coalesced(self, tensors: list[list[int]]) -> list[list[int]]:
        launch_handles = [_COMM.all_gather_into_tensor(tensor, async_op=True) for tensor in tensors]
        launch_handles[-1].wait()
        return tensors


def _gather(tensor: list[int], async_op: bool) -> _Handle:
    assert async_op
    return _Handle(tensor)


_COMM = SimpleNamespace(all_gather=_gather, all_gather_into_tensor=_gather)


def test_every_gather_of_several_weights_is_waited_for() -> None:
    module: Any = SimpleNamespace(Init=_Older, dist=_COMM)
    assert _Older()._allgather_params_coalesced([[0], [0], [0]]) == [[0], [0], [1]]
    wait_for_every_gather(module)
    assert _Older()._allgather_params_coalesced([[0], [0], [0]]) == [[1], [1], [1]]
    assert vars(_COMM) == {"all_gather": _gather, "all_gather_into_tensor": _gather}


def test_a_release_that_waits_for_all_is_left_as_it_is() -> None:
    from deepspeed.runtime.zero import partition_parameters

    before = partition_parameters.Init._allgather_params_coalesced
    waits_for_last = "launch_handles[-1].wait()" in Path(partition_parameters.__file__).read_text()
    wait_for_every_gather(partition_parameters)
    try:
        assert (partition_parameters.Init._allgather_params_coalesced is before) is not waits_for_last
    finally:
        partition_parameters.Init._allgather_params_coalesced = before
