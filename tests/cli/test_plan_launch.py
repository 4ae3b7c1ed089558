"""What launch makes of the flags, on a machine with many GPUs: it is told of them, not asked for real."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.cli import launch as cli
from zerofit.facts import GpuSpec, Machine
from zerofit.launcher.launch import Launch
from zerofit.units import GIB

_H100 = GpuSpec(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB, compute_capability=(9, 0))
_EIGHT = Machine(
    gpus=(_H100,) * 8, num_cpu_cores=8, host_memory_bytes=64 * GIB, host_memory_available_bytes=60 * GIB
)


def _plan_launch(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Launch:
    """Return the launch that the flags make on a node with eight GPUs."""
    monkeypatch.setattr(cli, "probe_machine", lambda **_: _EIGHT)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    parameters: dict[str, Any] = cli.launch.make_context("launch", [*flags, "train.py"]).params
    for name in ("script", "script_args", "module", "run_dir", "no_check", "dry_run"):
        del parameters[name]
    return cli._plan_launch(parameters.pop("hostfile"), ("train.py",), parameters)


def test_a_lone_rank_gets_one_gpu_and_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = _plan_launch(monkeypatch, "--num-processes", "1")
    assert launch.rendezvous.gpu_ids == "0"
    assert cli._lines(launch)[-1] == (
        "one rank uses GPU 0 alone: with more in sight Trainer would spread over them all"
    )


@pytest.mark.parametrize("flags", [(), ("--num-processes", "1", "--zero-stage", "2"), ("--cpu",)])
def test_other_runs_are_left_with_all_gpus(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]) -> None:
    launch = _plan_launch(monkeypatch, *flags)
    assert launch.rendezvous.gpu_ids is None
    assert not any("alone" in line for line in cli._lines(launch))


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        (("--nproc_per_node", "gpu"), 8),
        (("--nproc-per-node", "auto"), 8),
        (("--nproc-per-node", "gpu", "--cpu"), 1),
        (("--nproc-per-node", "4"), 4),
    ],
)
def test_ranks_per_node_in_torchruns_words(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], world_size: int
) -> None:
    assert _plan_launch(monkeypatch, *flags).plan.topology.world_size == world_size
