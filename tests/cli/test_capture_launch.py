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
from launch_flags import launch_flags

from zerofit.cli.launch import launch_settings
from zerofit.cli.output.console import Console
from zerofit.core.capture import Capture, for_plan
from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.overrides import Overrides
from zerofit.core.plan import plan_from_json, plan_to_json
from zerofit.core.strategy import Engine, Precision, ZeroStage
from zerofit.core.units import GIB
from zerofit.launching import nodes as nodes_file
from zerofit.launching import prepare
from zerofit.launching.launch import announce_plan, check_rules
from zerofit.launching.nodes import on_this_node
from zerofit.launching.prepare import prepare_launch
from zerofit.launching.run_folder import run_folder
from zerofit.launching.start import PlannedLaunch, launch_files
from zerofit.planning.applied_table import applied_rows
from zerofit.planning.resolve import Verb, resolve
from zerofit.training.settings import settings_of
from zerofit.training.setup.batch_size import check_batch

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

    def made(
        *flags: str,
        machine: Machine = _NODE,
        capture: Capture | None = LOOP,
        target: tuple[str, ...] = LOOP.target,
    ) -> PlannedLaunch:
        @contextmanager
        def captured(target: tuple[str, ...], **_: Any) -> Iterator[Any]:
            assert capture is not None, f"{target} was captured"
            yield SimpleNamespace(capture=capture, is_cached=False)

        monkeypatch.setattr(nodes_file, "probe_machine", lambda **_: machine)
        monkeypatch.setattr(prepare, "captured", captured)
        plans = not {"--no-capture", "--preset", "--plan"} & {*flags} and (machine.gpus or "--gpus" in flags)
        is_fast = ["--fast"] if plans and ("--cpu" not in flags or "--gpus" in flags) else []
        settings = launch_settings(launch_flags(*is_fast, *flags, "train.py"))
        return prepare_launch(on_this_node(resolve(target, verb=Verb.LAUNCH, **settings)), Console())

    return made


def test_a_script_alone_is_captured_and_planned(plan_launch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    to_launch = plan_launch()
    plan = to_launch.plan
    assert plan.capture == for_plan(LOOP)
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


def test_the_plan_follows_the_flags(plan_launch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    to_launch = plan_launch("--zero-stage", "2", "--micro-batch-size", "4", "--gradient-checkpointing")
    strategy = to_launch.plan.strategy
    assert (strategy.zero_stage, strategy.micro_batch_size) == (ZeroStage.GRADIENTS, 4)
    assert (strategy.gradient_accumulation_steps, strategy.gradient_checkpointing) == (4, True)
    capsys.readouterr()
    announce_plan(to_launch, Console())
    told = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in told[3:]] == [
        "batch on each rank",
        "engine",
        "gradient checkpointing",
    ]
    assert told[3].endswith("--micro-batch-size says so; global batch 32 as before")


def test_the_run_folders_plan_holds_the_capture(plan_launch: Any) -> None:
    folder = run_folder(Path("runs"), target="train.py", at=datetime(2026, 1, 2))
    plan = plan_from_json(launch_files(plan_launch(), folder)[folder.plan], name="plan.json")
    assert plan.capture == for_plan(LOOP)


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
def test_launches_without_a_capture(plan_launch: Any, flags: tuple[str, ...]) -> None:
    assert plan_launch(*flags, capture=None).plan.capture is None


@pytest.mark.parametrize(
    "flags", [(), ("--preset", "z2"), ("--no-capture", "--num-processes", "8"), ("--nproc-per-node", "gpu")]
)
def test_on_a_machine_without_gpus_nothing_is_launched_without_cpu(
    plan_launch: Any, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as error:
        plan_launch(*flags, machine=_LAPTOP, capture=None)
    assert error.value.rule == "no-gpu"
    assert plan_launch("--cpu", *flags, machine=_LAPTOP, capture=None).plan.topology.on_cpu
    assert capsys.readouterr().err == ""


_PLANNING, _CAPTURE = "planning-flag-without-planning", "capture-limit-without-capture"


@pytest.mark.parametrize(
    ("flags", "rule", "found"),
    [
        ("--cpu --reserve 9%", _PLANNING, "--reserve with --cpu"),
        ("--preset z2 --allow adafactor", _PLANNING, "--allow with --preset z2"),
        ("--no-capture --seq-len 9", _PLANNING, "--seq-len with --no-capture"),
        ("--cpu --capture-limit 9", _CAPTURE, "--capture-limit 9 with --cpu"),
        (
            "--model gpt2 --seq-len 8 --global-batch 8 --capture-limit 9",
            _CAPTURE,
            "--capture-limit 9 with --model",
        ),
        (
            "--gradient-accumulation-steps 3",
            "batches-split-in-equal-parts",
            "--gradient-accumulation-steps 3",
        ),
        (
            "--gradient-accumulation-steps 4 --micro-batch-size 8",
            "global-batch-not-divisible",
            "the script's global batch 32 with 2 ranks x micro-batch 8 x accumulation 4 = 64",
        ),
    ],
)
def test_ignored_or_ambiguous_flags_are_refused(plan_launch: Any, flags: str, rule: str, found: str) -> None:
    with pytest.raises(UserError) as error:
        plan_launch(*flags.split())
    assert (error.value.rule, error.value.found) == (rule, found)


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
    to_launch = plan_launch(
        "--cpu", "--gpus", "4xA100-40G", "--zero-stage", "2", "--prefer-speed", machine=_LAPTOP
    )
    plan = to_launch.plan
    assert (plan.topology.world_size, plan.topology.on_cpu) == (4, True)
    assert (plan.machine.gpus, plan.workload.global_batch_size) == ((), 64)
    assert (plan.strategy.engine, plan.strategy.precision) == (Engine.DEEPSPEED, Precision.BF16)
    fewer = plan_launch("--cpu", "--gpus", "4xA100-40G", "--num-processes", "2", machine=_LAPTOP)
    assert fewer.plan.topology.world_size == 2
    with pytest.raises(UserError) as error:
        plan_launch("--cpu", "--gpus", "1xA100-40G", "--num-processes", "2", machine=_LAPTOP)
    assert (error.value.rule, error.value.fix) == (
        "more-ranks-than-gpus",
        "name more GPUs in --gpus, or set --num-processes to at most 1",
    )


def test_fp16_is_rehearsed_in_fp32(plan_launch: Any) -> None:
    plan = plan_launch("--cpu", "--gpus", "2xV100-32G", "--prefer-speed", machine=_LAPTOP).plan
    reasons = [reason.why for reason in plan.reasons if reason.field == "precision"]
    assert plan.strategy.precision is Precision.FP32
    assert reasons == ["CPU ranks have no fp16, which the plan for the GPUs takes"]


def test_settings_that_the_script_does_not_support_are_refused(plan_launch: Any) -> None:
    mixing = with_model(LOOP, mixes_samples=("bn1",))
    for flags in (("--micro-batch-size", "4"), ("--cpu", "--gpus", "2xA100-40G", "--micro-batch-size", "4")):
        with pytest.raises(UserError) as error:
            plan_launch(*flags, capture=mixing)
        assert error.value.rule == "batches-stay-whole"


def test_nothing_is_launched_that_does_not_fit_and_no_capture_is_suggested(plan_launch: Any) -> None:
    huge = replace(LOOP.model.facts, num_parameters=10**14, num_trainable_parameters=10**14)
    with pytest.raises(UserError) as error:
        plan_launch("--engine", "native", capture=with_model(LOOP, facts=huge))
    assert (error.value.rule, error.value.exit_code) == ("nothing-fits", 1)
    assert error.value.found.startswith("train.py on 2 GPUs: ")


@pytest.fixture
def plan_file(plan_launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a plan for LOOP on two GPUs."""
    path = tmp_path / "p.json"
    path.write_text(plan_to_json(plan_launch("--zero-stage", "2", "--micro-batch-size", "4").plan))
    capsys.readouterr()
    return path


def test_a_plan_file_brings_its_own_capture(plan_launch: Any, plan_file: Path) -> None:
    (plan_file.parent / "capture.json").write_text("of another plan")
    plan = plan_launch("--plan", "p.json", capture=None).plan
    assert plan.capture == for_plan(LOOP)
    assert plan_to_json(plan) == plan_to_json(plan_launch("--plan", "p.json", capture=None).plan)


_OTHER = (*LOOP.target, "--bs", "4")


def test_a_plan_file_for_other_arguments_is_held_against_what_the_script_trains_with_these(
    plan_launch: Any, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = replace(LOOP, target=_OTHER)
    plan = plan_launch("--plan", "p.json", target=_OTHER, capture=same).plan
    assert plan.capture == for_plan(same)
    assert capsys.readouterr().err == (
        "zerofit: p.json was made for `train.py --epochs 3`, but this is `train.py --epochs 3 --bs 4`\n"
    )
    with pytest.raises(UserError) as error:
        plan_launch("--plan", "p.json", target=_OTHER, capture=replace(same, micro_batch_size=4))
    assert (error.value.rule, error.value.found) == (
        "plan-of-another-run",
        "p.json is for GPT2LMHeadModel of 124,439,808 parameters in batches of 8 x 2, and the script trains "
        "GPT2LMHeadModel of 124,439,808 parameters in batches of 4 x 2",
    )


def test_a_plan_file_that_nobody_held_against_the_script_gives_no_reasons_of_another(
    plan_launch: Any, plan_file: Path
) -> None:
    plan = plan_launch("--plan", "p.json", "--no-capture", target=_OTHER, capture=None).plan
    assert plan.capture is None
    assert {row.why for row in applied_rows(plan)} == {
        "--zero-stage says so",
        "--micro-batch-size says so",
        "the plan says so",
    }


def test_a_plan_file_on_other_ranks_keeps_the_scripts_batch(plan_launch: Any, plan_file: Path) -> None:
    plan = plan_launch("--plan", "p.json", "--cpu", "--num-processes", "4", capture=None).plan
    steps = plan.strategy.gradient_accumulation_steps
    assert (plan.workload.global_batch_size, plan.strategy.micro_batch_size, steps) == (64, 4, 4)


def test_a_plan_file_does_not_bypass_what_the_script_does_not_support(
    plan_launch: Any, plan_file: Path
) -> None:
    with pytest.raises(UserError) as error:
        plan_launch("--plan", "p.json", "--global-batch", "64", capture=None)
    assert error.value.rule == "global-batch-is-the-scripts"


def test_a_plan_for_gpus_is_not_started_on_a_cpu_by_chance(plan_launch: Any, plan_file: Path) -> None:
    with pytest.raises(UserError) as error:
        plan_launch("--plan", "p.json", machine=_LAPTOP, capture=None)
    assert error.value.rule == "no-gpu"
    assert plan_launch("--plan", "p.json", "--cpu", machine=_LAPTOP, capture=None).plan.topology.on_cpu


def test_passes_that_the_loop_counts_itself_are_no_accumulation_of_its_accelerator(plan_launch: Any) -> None:
    by_hand = replace(LOOP, gradient_accumulation_steps=1, accumulates=False, accumulates_by_hand=4)
    plan = plan_launch("--micro-batch-size", "2", capture=by_hand).plan
    assert plan.strategy.gradient_accumulation_steps == 16
    settings = settings_of(plan)
    assert settings.strategy.gradient_accumulation_steps == 4
    check_batch(settings, batch_size=8, accumulation=1, num_ranks=2)


def test_a_script_that_says_no_mixed_precision_gets_none_unless_a_flag_says_so(plan_launch: Any) -> None:
    says_no = replace(LOOP, names_precision=True)
    assert plan_launch("--prefer-speed").plan.strategy.precision is Precision.BF16
    plan = plan_launch("--prefer-speed", capture=says_no).plan
    assert plan.strategy.precision is Precision.FP32
    assert "precision" not in {row.what for row in applied_rows(plan)}
    plan = plan_launch("--mixed-precision", "bf16", capture=says_no).plan
    (row,) = (row for row in applied_rows(plan) if row.what == "precision")
    assert (row.script_says, row.runs, row.why) == ("fp32", "bf16", "--mixed-precision says so")


def test_the_rules_know_what_was_captured(plan_launch: Any) -> None:
    sgd = replace(LOOP.optimizers[0], class_path="torch.optim.sgd.SGD")
    flags = ("--cpu", "--num-processes", "2", "--preset", "z2-offload", "--global-batch-size", "32")
    check_rules(plan_launch(*flags), Console(), said=Overrides())
    to_launch = plan_launch(*flags, capture=replace(LOOP, optimizers=(sgd,)))
    with pytest.raises(ExceptionGroup) as error:
        check_rules(to_launch, Console(), said=Overrides())
    assert [str(one).splitlines()[1] for one in error.value.exceptions] == [
        "  found: the script's SGD with optimizer offload to cpu"
    ]
