"""What launch makes of the flags, on a machine with many GPUs: it is told of them, not settings for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch_flags import launch_flags

from zerofit.cli.launch import launch_settings
from zerofit.cli.output.console import Console
from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.plan import plan_to_json
from zerofit.core.units import GIB
from zerofit.launching import nodes as nodes_file
from zerofit.launching.launch import announce_plan
from zerofit.launching.nodes import on_this_node
from zerofit.launching.prepare import prepare_launch
from zerofit.launching.start import PlannedLaunch
from zerofit.planning.resolve import Verb, resolve
from zerofit.planning.run_spec import RunSpec

_H100 = GpuSpec(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB, compute_capability=(9, 0))
_EIGHT = Machine(
    gpus=(_H100,) * 8, num_cpu_cores=8, host_memory_bytes=64 * GIB, host_memory_available_bytes=60 * GIB
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that holds the script, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def _asked(target: tuple[str, ...], **settings: Any) -> RunSpec:
    return on_this_node(resolve(target, verb=Verb.LAUNCH, **settings))


def _plan_launch(monkeypatch: pytest.MonkeyPatch, *flags: str) -> PlannedLaunch:
    """Return the launch that the flags make on a node with eight GPUs."""
    monkeypatch.setattr(nodes_file, "probe_machine", lambda **_: _EIGHT)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = launch_settings(launch_flags(*flags, "train.py"))
    return prepare_launch(_asked(("train.py",), **settings), Console())


def test_a_lone_rank_gets_one_gpu_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to_launch = _plan_launch(monkeypatch, "--no-capture", "--num-processes", "1")
    assert to_launch.rendezvous.gpu_ids == "0"
    announce_plan(to_launch, Console())
    assert capsys.readouterr().err.endswith(
        "zerofit: one rank uses only GPU 0: with more visible, Trainer would use them all\n"
    )


@pytest.mark.parametrize("flags", [(), ("--num-processes", "1", "--zero-stage", "2"), ("--cpu",)])
def test_other_runs_are_left_with_all_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    to_launch = _plan_launch(monkeypatch, "--no-capture", *flags)
    assert to_launch.rendezvous.gpu_ids is None
    announce_plan(to_launch, Console())
    assert "uses GPU" not in capsys.readouterr().err


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
    assert _plan_launch(monkeypatch, "--no-capture", *flags).plan.topology.world_size == world_size


_MODEL = ("--model", "llama-2-7b", "--seq-len", "512", "--fast")


def test_a_launch_with_a_model_follows_its_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = _plan_launch(monkeypatch, *_MODEL, "--global-batch", "64", "--zero-stage", "3").plan
    strategy = plan.strategy
    batch = (strategy.micro_batch_size or 0) * (strategy.gradient_accumulation_steps or 0)
    assert (strategy.zero_stage, batch * 8, plan.workload.sequence_length) == (3, 64, 512)
    assert plan.model is not None
    assert plan.estimate is not None
    assert "llama-2-7b (LlamaForCausalLM, 6.74 B parameters)" in capsys.readouterr().err


def test_without_a_global_batch_one_sample_a_rank_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan_launch(monkeypatch, *_MODEL, "--num-processes", "4").plan
    strategy = plan.strategy
    assert (strategy.micro_batch_size, strategy.gradient_accumulation_steps) == (1, 1)
    assert (plan.topology.world_size, plan.workload.global_batch_size) == (4, None)


def test_what_does_not_fit_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without DeepSpeed there is less to search.
    words = "--model llama-3-70b --seq-len 8192 --fast --num-processes 1 --engine native"
    with pytest.raises(UserError) as error:
        _plan_launch(monkeypatch, *words.split())
    assert (error.value.rule, error.value.exit_code) == ("nothing-fits", 1)


@pytest.mark.parametrize(
    ("script", "flags", "keeps_outputs"),
    [
        ("from accelerate import Accelerator\nAccelerator()\n", (), True),
        pytest.param(
            "from transformers import Trainer\nTrainer().train()\n", (), False, marks=pytest.mark.slow
        ),
        ("from transformers import Trainer\nTrainer().train()\n", ("--loop", "plain"), True),
        ("print()\n", (), True),
        pytest.param("print()\n", ("--loop", "trainer"), False, marks=pytest.mark.slow),
        ("def broken(\n", (), True),
    ],
)
def test_whose_loop_runs_is_read_off_the_script(
    monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, flags: tuple[str, ...], keeps_outputs: bool
) -> None:
    (folder / "train.py").write_text(script)
    plan = _plan_launch(monkeypatch, *_MODEL, "--global-batch", "8", *flags).plan
    assert plan.workload.keeps_outputs == keeps_outputs


def test_a_model_that_is_made_before_the_accelerator_comes_whole(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    lines = ("model = AutoModel.from_pretrained('x')\n", "accelerator = Accelerator()\n")
    rest = "model = accelerator.prepare(model)\n"
    needed = []
    for first, second in (lines, lines[::-1]):
        imports = "from accelerate import Accelerator\nfrom transformers import AutoModel\n"
        (folder / "train.py").write_text(imports + first + second + rest)
        plan = _plan_launch(monkeypatch, *_MODEL, "--global-batch", "8", "--zero-stage", "3").plan
        assert plan.estimate
        needed.append(max(phase.total_bytes for phase in plan.estimate.device.phases[:2]))
    assert needed[0] > needed[1]


_NOTHING = Machine(gpus=(), num_cpu_cores=2, host_memory_bytes=4 * GIB, host_memory_available_bytes=3 * GIB)


def test_a_dry_run_of_a_plan_on_a_login_node_is_of_the_machine_that_was_planned_for(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    planned = _plan_launch(monkeypatch, "--no-capture", "--zero-stage", "3").plan
    (folder / "plan.json").write_text(plan_to_json(planned))
    monkeypatch.setattr(nodes_file, "probe_machine", lambda **_: _NOTHING)
    settings = launch_settings(launch_flags("--plan", "plan.json", "--no-capture", "train.py"))
    to_launch = prepare_launch(_asked(("train.py",), **settings, dry_run=True), Console())
    assert to_launch.plan.strategy == planned.strategy
    assert to_launch.plan.topology.world_size == 8
    with pytest.raises(UserError) as error:
        prepare_launch(_asked(("train.py",), **settings), Console())
    assert error.value.rule == "no-gpu"


def test_the_machine_of_a_dry_run_is_described_as_for_a_plan() -> None:
    words = ("--gpus", "8xH100", "--host-ram", "1T", "--cpu-cores", "32")
    settings = launch_settings(launch_flags(*words, "--no-capture", "train.py"))
    machine = _asked(("train.py",), **settings, dry_run=True).node
    assert (len(machine.gpus), machine.num_cpu_cores) == (8, 32)
    assert machine.host_memory_bytes == 1024 * GIB
    some = launch_settings(launch_flags(*words, "--gpu-ids", "0,5", "--no-capture", "train.py"))
    assert len(_asked(("train.py",), **some, dry_run=True).node.gpus) == 2
    wrong = launch_settings(launch_flags(*words, "--gpu-ids", "0,8", "--no-capture", "train.py"))
    with pytest.raises(UserError, match="--gpus 8xH100 lists 0 to 7"):
        _asked(("train.py",), **wrong, dry_run=True)
    settings = launch_settings(launch_flags(*words[2:], "--cpu", "train.py"))
    with pytest.raises(UserError) as error:
        prepare_launch(_asked(("train.py",), **settings), Console())
    assert error.value.rule == "gpus-missing"
