"""zerofit.apply: what it refuses, what it replaces, and when it does nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from accelerators import forget_accelerators
from refusals import refusal
from runs import run_command
from small_runs import PLAN

import zerofit
from zerofit.configs.write.accelerate import fsdp_environment
from zerofit.configs.write.command import rank_environment
from zerofit.core.plan import Origin, Plan, Reason, Topology, plan_to_json
from zerofit.core.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage
from zerofit.training import apply as applying
from zerofit.training.changes import Changes
from zerofit.training.late_imports import imported_functions, replace_imported_copies
from zerofit.training.launcher_settings import set_environment

ZERO_2 = replace(PLAN, strategy=Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS))
FSDP2 = replace(PLAN, strategy=Strategy(engine=Engine.FSDP2, reshard_after_forward=False))
BF16 = replace(PLAN, strategy=Strategy(precision=Precision.BF16))
FOUR_STEPS = replace(PLAN, strategy=Strategy(gradient_accumulation_steps=4))
ON_GPU = replace(PLAN, topology=Topology())
DEFAULT = Reason(field="precision", value="bf16", origin=Origin.DEFAULT, why="")


@pytest.fixture(autouse=True)
def _without_accelerators() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


MISSING = """\
error[plan-file-missing]: the plan file can't be read
  found: zerofit.apply('nowhere.json'): No such file or directory
  why:   the script is to train as that plan says
  fix:   write it with `zerofit plan --output FILE SCRIPT`"""
OTHER_RANKS = """\
error[world-size-differs]: the plan is for another number of ranks
  found: 1 rank, and a plan for 2
  why:   batches and memory of each rank depend on how many share the work
  fix:   start 2 ranks (accelerate launch --num_processes 2, or torchrun --nproc_per_node 2), or plan again"""
ON_TWO = replace(PLAN, topology=Topology(world_size=2, on_cpu=True))


@pytest.mark.parametrize(("plan", "message"), [("nowhere.json", MISSING), (ON_TWO, OTHER_RANKS)])
def test_a_plan_that_can_not_be_applied_is_refused(plan: Any, message: str) -> None:
    assert str(refusal(zerofit.apply, plan)) == message


@pytest.mark.parametrize(
    ("ranks", "on_node", "found"),
    [
        ("4", "4", "4 on this node, and a plan for 2 on each of its nodes"),
        ("2", "2", "2 ranks, and a plan for 4"),
        ("8", "2", "8 ranks, and a plan for 4"),
    ],
)
def test_other_ranks_than_the_plans_are_refused(
    ranks: str, on_node: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", on_node)
    plan = replace(PLAN, topology=Topology(num_nodes=2, world_size=4, on_cpu=True))
    refused = refusal(zerofit.apply, plan)
    assert (refused.rule, refused.found) == ("world-size-differs", found)


@pytest.mark.parametrize(
    ("plan", "launcher", "found"),
    [
        (PLAN, {"USE_FSDP": "true"}, "ACCELERATE_USE_FSDP=true, and the plan says engine native"),
        (
            FSDP2,
            {"USE_FSDP": "true"},
            "ACCELERATE_USE_FSDP=true with FSDP_VERSION=1, and the plan says engine fsdp2",
        ),
        (FSDP2, {"USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED=true, and the plan says engine fsdp2"),
        (
            ZERO_2,
            {"USE_PARALLELISM_CONFIG": "true"},
            "ACCELERATE_USE_PARALLELISM_CONFIG=true, and the plan says engine deepspeed",
        ),
        (
            ZERO_2,
            {"USE_MEGATRON_LM": "true"},
            "ACCELERATE_USE_MEGATRON_LM=true, and the plan says engine deepspeed",
        ),
        (PLAN, {"USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED=true, and the plan says engine native"),
        (
            ZERO_2,
            {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "3"},
            "ACCELERATE_DEEPSPEED_ZERO_STAGE=3, and the plan says stage 2",
        ),
        (
            ZERO_2,
            {"USE_DEEPSPEED": "true", "DEEPSPEED_CONFIG_FILE": "ds.json"},
            "ACCELERATE_DEEPSPEED_CONFIG_FILE=ds.json with stage 3, and the plan says stage 2",
        ),
        (
            ZERO_2,
            {"USE_DEEPSPEED": "true", "DEEPSPEED_CONFIG_FILE": "none.json"},
            "ACCELERATE_DEEPSPEED_CONFIG_FILE=none.json can't be read, and the plan says stage 2",
        ),
        (ON_GPU, {"USE_CPU": "true"}, "ACCELERATE_USE_CPU=true, and the plan says GPUs"),
        (BF16, {"MIXED_PRECISION": "fp16"}, "ACCELERATE_MIXED_PRECISION=fp16, and the plan says bf16"),
        (
            FOUR_STEPS,
            {"GRADIENT_ACCUMULATION_STEPS": "2", "USE_FSDP": "1"},
            "ACCELERATE_USE_FSDP=true, and the plan says engine native; "
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2, and the plan says 4",
        ),
    ],
)
def test_a_launcher_that_is_configured_for_something_else_is_refused(
    plan: Plan, launcher: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    for name, value in launcher.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    refused = refusal(zerofit.apply, plan)
    assert (refused.rule, refused.found) == ("launcher-contradicts-plan", found)


def test_a_plan_after_an_accelerator_or_training_arguments_is_refused(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from transformers import TrainingArguments

    for make in (
        lambda: Accelerator(cpu=True),
        lambda: TrainingArguments(output_dir=str(tmp_path), use_cpu=True),
    ):
        forget_accelerators()
        make()
        assert str(refusal(zerofit.apply, PLAN)) == (
            "error[apply-too-late]: the plan comes after the script's Accelerator or TrainingArguments\n"
            "  found: zerofit.apply(plan), and accelerate has set up its ranks already\n"
            "  why:   engine, ranks and precision are fixed when the first of them is made\n"
            "  fix:   call zerofit.apply(plan) first in the script, before Accelerator() and "
            "TrainingArguments()"
        )


def test_a_plan_that_a_rule_forbids_is_refused() -> None:
    strategy = replace(ZERO_2.strategy, param_offload=OffloadDevice.CPU)
    with pytest.raises(ExceptionGroup) as caught:
        zerofit.apply(replace(ZERO_2, strategy=strategy))
    (error,) = caught.value.exceptions
    assert "parameter offload needs ZeRO-3" in str(error)


def test_a_captured_script_and_a_worker_that_imports_it_go_on_without_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from multiprocessing.process import current_process

    with monkeypatch.context() as patch:
        patch.setattr(sys, "orig_argv", ["python", "-m", "zerofit.scripts.capture.child", "F", "train.py"])
        zerofit.apply("not-made-yet.json")
    monkeypatch.setattr(current_process(), "_inheriting", True, raising=False)
    zerofit.apply("not-made-yet.json")


def test_one_process_applies_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "hooked_plan", lambda: (PLAN, Changes(announce=False)))
    monkeypatch.setattr(applying, "_applied", PLAN)
    zerofit.apply(PLAN)
    assert str(refusal(zerofit.apply, BF16)) == (
        "error[plan-applied-already]: the script applies two plans\n"
        "  found: zerofit.apply(plan), after another plan: PyTorch without DeepSpeed on 1 CPU rank\n"
        "  why:   its hooks are in accelerate and transformers, once for the whole process\n"
        "  fix:   apply one plan, in a process of its own"
    )


@pytest.mark.parametrize(
    ("plan", "own", "expected"),
    [
        (PLAN, None, "no"),
        (PLAN, "bf16", "bf16"),
        (BF16, None, "bf16"),
        (BF16, "no", "bf16"),
        (replace(BF16, reasons=(DEFAULT,)), "no", "bf16"),
        (replace(BF16, reasons=(DEFAULT,)), "fp16", "fp16"),
    ],
)
def test_the_launchers_precision_counts_where_the_plan_leaves_it_open(
    plan: Plan, own: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {} if own is None else {"ACCELERATE_MIXED_PRECISION": own}
    monkeypatch.setattr("os.environ", environment)
    set_environment(plan, deepspeed_file=None, changes=Changes(announce=False))
    assert environment["ACCELERATE_MIXED_PRECISION"] == expected


def test_fsdp2_is_configured_by_the_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    }
    changes = Changes(announce=False)
    monkeypatch.setattr("os.environ", environment)
    set_environment(FSDP2, deepspeed_file=None, changes=changes)
    found = {name: value for name, value in environment.items() if "FSDP" in name or "PARALLELISM" in name}
    assert found == fsdp_environment(FSDP2)
    assert found["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    assert environment["WORLD_SIZE"] == "1"
    assert changes.lines == (
        "FSDP2 is configured as the plan says; the launcher brings its own configuration",
    )


def test_deepspeed_is_configured_by_the_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = Changes(announce=False)
    environment = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage",
    }
    monkeypatch.setattr("os.environ", environment)
    set_environment(ZERO_2, deepspeed_file=Path("/runs/ds_config.json"), changes=changes)
    wanted = rank_environment(ZERO_2, deepspeed_file="/runs/ds_config.json")
    assert {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")} == wanted
    assert (environment["DS_ACCELERATOR"], environment["RANK"], environment["WORLD_SIZE"]) == (
        "cpu",
        "0",
        "1",
    )
    assert changes.lines == (
        "DeepSpeed is configured as the plan says; the launcher brings its own configuration",
    )


def test_functions_that_were_imported_before_their_hooks_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, part, script = (ModuleType(name) for name in ("owner", "owner.part", "script"))
    exec("def clip(): return 'theirs'\ndef save(): return 'theirs'", vars(part))
    for name in ("clip", "save"):
        setattr(owner, name, getattr(part, name))
        getattr(part, name).__module__ = "owner.part"
    owner.foreign = json.dumps
    script.own_name, script.save, script.dumps = owner.clip, owner.save, json.dumps
    for module in (owner, part, script):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before = imported_functions(["owner", "not.imported", "owner"])
    owner.clip = lambda: "hooked"
    owner.foreign = lambda: "for the owner alone"
    replace_imported_copies(before)
    assert (script.own_name(), part.clip(), script.save()) == ("hooked", "hooked", "theirs")
    assert script.dumps is json.dumps


ENDS = """\
import sys, zerofit
zerofit.apply("plan.json")
from zerofit import UserError
{end}
"""


@pytest.mark.parametrize(
    ("end", "exit_code", "error"),
    [
        ("pass", 0, None),
        pytest.param("sys.exit(3)", 3, None, marks=pytest.mark.slow),
        ("sys.exit('no data')", 1, None),
        ("raise KeyError('x')", 1, "KeyError"),
        ("raise UserError('a-rule', 'wrong', found='f', why='w', fix='x')", 1, "UserError"),
    ],
)
def test_a_rank_records_how_its_script_ended(
    end: str, exit_code: int, error: str | None, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(plan_to_json(PLAN))
    (tmp_path / "ends.py").write_text(ENDS.format(end=end))
    run = run_command([sys.executable, "ends.py"], tmp_path)
    assert run.exit_code == exit_code
    record = json.loads((run.run_folder / "ranks" / "rank0.json").read_text())
    assert (record["exit_code"], record["error_type"]) == (exit_code, error)
    assert run.stderr.startswith(
        f"zerofit: the plan is PyTorch without DeepSpeed on 1 CPU rank; its record is in {run.run_folder}\n"
    )
    assert ("Traceback" in run.stderr) == (error == "KeyError")
    assert (run.folder / "zerofit-runs" / ".gitignore").read_text() == "*\n"


def test_a_refusal_is_printed_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import zerofit\nzerofit.apply('nowhere.json')\n")
    run = run_command([sys.executable, "train.py"], tmp_path)
    assert (run.exit_code, run.stderr) == (1, f"{MISSING}\n")


def test_a_folder_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = refusal(zerofit.apply, PLAN, run_dir=tmp_path / "file")
    assert refused.rule == "run-folder-not-writable"
    assert refused.fix == "name a writable folder: zerofit.apply(..., run_dir=DIR)"


@pytest.mark.parametrize("name", ["accelerator", "apply_strategy", "trainer", "training_arguments"])
def test_a_removed_name_tells_what_to_use(name: str) -> None:
    with pytest.raises(ImportError) as caught:
        getattr(zerofit, name)
    assert str(caught.value) == (
        f"zerofit.{name} was removed: call zerofit.apply('plan.json') first in the script, and use "
        "accelerate and transformers as ever"
    )
