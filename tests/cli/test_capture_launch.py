"""What launch makes of a script that was captured: the plan, its constraints, the run folder's files.

The capture is made by hand, and the node has GPUs that are only told of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from captures import LOOP, TRAINER, with_model

from zerofit.capture import Capture, capture_from_json, capture_to_json
from zerofit.cli import launch_plan
from zerofit.cli.launch import _check_rules, _tell, launch
from zerofit.errors import UserError
from zerofit.facts import GpuSpec, Machine
from zerofit.launcher.launch import Launch, launch_files
from zerofit.launcher.run_folder import run_folder
from zerofit.plan import plan_to_json
from zerofit.strategy import Engine, Precision, ZeroStage
from zerofit.units import GIB

_A100 = GpuSpec(name="NVIDIA A100-SXM4-40GB", memory_bytes=40 * GIB, compute_capability=(8, 0))
_LAPTOP = Machine(gpus=(), num_cpu_cores=4, host_memory_bytes=32 * GIB, host_memory_available_bytes=30 * GIB)
_NODE = replace(_LAPTOP, gpus=(_A100,) * 2)


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text("")


@pytest.fixture
def plan_launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a launch of flags, on a node, of a script with a capture."""

    def made(*flags: str, machine: Machine = _NODE, capture: Capture | None = LOOP) -> Launch:
        @contextmanager
        def captured(target: tuple[str, ...], *, limit_s: float) -> Iterator[Any]:
            assert capture is not None, f"{target} was captured"
            yield SimpleNamespace(capture=capture)

        monkeypatch.setattr(launch_plan, "probe_machine", lambda **_: machine)
        monkeypatch.setattr(launch_plan, "captured", captured)
        parameters: dict[str, Any] = launch.make_context("launch", ["--fast", *flags, "train.py"]).params
        for name in ("script", "script_args", "module", "run_dir", "no_check", "dry_run"):
            del parameters[name]
        return launch_plan.plan_launch(LOOP.target, parameters)

    return made


def test_a_script_alone_is_captured_and_planned(plan_launch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    to_launch = plan_launch()
    plan = to_launch.plan
    assert to_launch.capture == LOOP
    assert (plan.topology.world_size, plan.workload.global_batch_size, plan.model) == (
        2,
        32,
        LOOP.model.facts,
    )
    size, steps = plan.strategy.micro_batch_size, plan.strategy.gradient_accumulation_steps
    assert size * steps * 2 == 32
    said = capsys.readouterr().err
    assert said.startswith("train.py trains GPT2LMHeadModel of gpt2, 124 M parameters\n")
    assert "\ngpt2 (GPT2LMHeadModel, 124 M parameters), sequence 128, global batch 32" in said


def test_flags_are_what_the_plan_keeps_to(plan_launch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    to_launch = plan_launch("--zero-stage", "2", "--micro-batch-size", "4", "--gradient-checkpointing")
    strategy = to_launch.plan.strategy
    assert (strategy.zero_stage, strategy.micro_batch_size) == (ZeroStage.GRADIENTS, 4)
    assert (strategy.gradient_accumulation_steps, strategy.gradient_checkpointing) == (4, True)
    capsys.readouterr()
    _tell(to_launch)
    told = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in told[3:]] == [
        "batch on each rank",
        "engine",
        "precision",
        "gradient checkpointing",
    ]
    assert told[3].endswith("--micro-batch-size says so; global batch 32 as before")


def test_the_run_folder_gets_the_capture(plan_launch: Any) -> None:
    to_launch = plan_launch()
    folder = run_folder(Path("runs"), target="train.py", at=datetime(2026, 1, 2))
    files = launch_files(to_launch, folder)
    assert capture_from_json(files[folder.capture], name="capture.json") == LOOP
    assert files[folder.plan] == plan_to_json(to_launch.plan)
    without = launch_files(plan_launch("--no-capture", capture=None), folder)
    assert folder.capture not in without


@pytest.mark.parametrize(
    "flags",
    [
        ("--no-capture",),
        ("--preset", "z3"),
        ("--cpu",),
        ("--cpu", "--micro-batch-size", "2", "--global-batch-size", "8"),
        ("--model", "gpt2", "--seq-len", "128", "--global-batch", "32"),
    ],
)
def test_what_does_without_a_capture(plan_launch: Any, flags: tuple[str, ...]) -> None:
    assert plan_launch(*flags, capture=None).capture is None


def test_on_a_machine_without_gpus_a_launch_is_a_rehearsal_by_flags(plan_launch: Any) -> None:
    to_launch = plan_launch(machine=_LAPTOP, capture=None)
    assert (to_launch.plan.topology.on_cpu, to_launch.capture) == (True, None)


@pytest.mark.parametrize(
    ("capture", "flags", "batch"),
    [
        (LOOP, ("--cpu", "--num-processes", "4"), (8, 2)),
        (TRAINER, ("--cpu", "--num-processes", "4"), (8, 2)),
        (TRAINER, ("--cpu", "--num-processes", "2"), (8, 4)),
        (
            replace(LOOP, splits_batches=True, gradient_accumulation_steps=8),
            ("--cpu", "--num-processes", "2"),
            (4, 8),
        ),
        (TRAINER, ("--preset", "z2"), (8, 4)),
    ],
)
def test_a_global_batch_alone_is_made_of_the_scripts_own_micro_batch(
    plan_launch: Any, capture: Capture, flags: tuple[str, ...], batch: tuple[int, int]
) -> None:
    strategy = plan_launch(*flags, "--global-batch-size", "64", capture=capture).plan.strategy
    assert (strategy.micro_batch_size, strategy.gradient_accumulation_steps) == batch


@pytest.mark.parametrize("flags", [("--cpu", "--num-processes", "2"), ("--preset", "z2"), ()])
def test_a_global_batch_that_only_the_script_can_make_is_refused(
    plan_launch: Any, flags: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as error:
        plan_launch(*flags, "--global-batch-size", "64")
    assert error.value.rule == "global-batch-is-the-scripts"


def test_gpus_of_another_machine_are_planned_for_and_rehearsed_on_the_cpu(plan_launch: Any) -> None:
    to_launch = plan_launch("--cpu", "--gpus", "4xA100-40G", "--zero-stage", "2", machine=_LAPTOP)
    plan = to_launch.plan
    assert (plan.topology.world_size, plan.topology.on_cpu) == (4, True)
    assert (plan.machine.gpus, plan.workload.global_batch_size) == ((), 64)
    assert (plan.strategy.engine, plan.strategy.precision) == (Engine.DEEPSPEED, Precision.BF16)
    fewer = plan_launch("--cpu", "--gpus", "4xA100-40G", "--num-processes", "2", machine=_LAPTOP)
    assert fewer.plan.topology.world_size == 2
    with pytest.raises(UserError) as error:
        plan_launch("--cpu", "--gpus", "1xA100-40G", "--num-processes", "2", machine=_LAPTOP)
    assert error.value.rule == "more-ranks-than-gpus"


def test_fp16_is_rehearsed_in_fp32(plan_launch: Any) -> None:
    plan = plan_launch("--cpu", "--gpus", "2xV100-32G", machine=_LAPTOP).plan
    reasons = [reason.why for reason in plan.reasons if reason.field == "precision"]
    assert plan.strategy.precision is Precision.FP32
    assert reasons == ["CPU ranks have no fp16, which the plan for the GPUs takes"]


def test_what_the_script_cannot_take_is_refused(plan_launch: Any) -> None:
    mixing = with_model(LOOP, mixes_samples=("bn1",))
    for flags in (("--micro-batch-size", "4"), ("--cpu", "--gpus", "2xA100-40G", "--micro-batch-size", "4")):
        with pytest.raises(UserError) as error:
            plan_launch(*flags, capture=mixing)
        assert error.value.rule == "script-cannot-take"


def test_what_does_not_fit_is_not_launched_and_the_way_without_a_plan_is_named(plan_launch: Any) -> None:
    huge = replace(LOOP.model.facts, num_parameters=10**14, num_trainable_parameters=10**14)
    with pytest.raises(UserError) as error:
        plan_launch(capture=with_model(LOOP, facts=huge))
    assert (error.value.rule, error.value.exit_code) == ("nothing-fits", 1)
    assert error.value.found.startswith("train.py on 2 GPUs: ")


def test_a_plan_is_followed_with_the_capture_that_lies_beside_it(plan_launch: Any, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan_to_json(plan_launch().plan))
    flags = ("--plan", "plan.json")
    assert plan_launch(*flags, capture=None).capture is None
    (tmp_path / "capture.json").write_text(capture_to_json(LOOP))
    assert plan_launch(*flags, capture=None).capture == LOOP
    (tmp_path / "capture.json").write_text(capture_to_json(replace(LOOP, target=("other.py",))))
    assert plan_launch(*flags, capture=None).capture is None


def test_the_rules_know_what_was_captured(plan_launch: Any) -> None:
    sgd = replace(LOOP.optimizers[0], class_path="torch.optim.sgd.SGD")
    flags = ("--cpu", "--num-processes", "2", "--preset", "z2-offload", "--global-batch-size", "32")
    _check_rules(plan_launch(*flags), script="train.py", arguments=())
    to_launch = plan_launch(*flags, capture=replace(LOOP, optimizers=(sgd,)))
    with pytest.raises(ExceptionGroup) as error:
        _check_rules(to_launch, script="train.py", arguments=())
    assert [str(one).splitlines()[1] for one in error.value.exceptions] == [
        "  found: the script's SGD with --offload-optimizer cpu"
    ]
