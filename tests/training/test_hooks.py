"""The hooks of the training process: the order of a method's steps, and that none is forgotten."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from accelerators import quiet, settings
from transformers import Trainer

import zerofit.training
from zerofit.core.plan import Topology, TrialSteps
from zerofit.core.strategy import Lora, OptimizerName, ZeroStage
from zerofit.training import hooks, methods
from zerofit.training.hooks import MODULE_HOOKS
from zerofit.training.reporting import observe
from zerofit.training.saving import stop_signal
from zerofit.training.settings import AppliedSettings
from zerofit.training.wrapping import Step, Steps, around_steps, install_steps, wrap

_FOLDER = Path(zerofit.training.__file__).parent

_TABLES: dict[str, Steps] = {
    "Accelerator": methods.ACCELERATOR,
    "Trainer": methods.TRAINER,
    "CallbackHandler": methods.CALLBACKS,
    "DataLoader": methods.DATA_LOADER,
    "DeepSpeedEngine": methods.ENGINE,
    "torch.nn.utils": methods.TORCH_CLIPPING,
}
_OWNERS: dict[str, Any] = {"Accelerator": Accelerator, "Trainer": Trainer}
_USED_ELSEWHERE = {
    "zerofit.training.generate_hooks.install",  # by a function of hooks.py, which gives it its limit
    "zerofit.training.hooks.install",
    "zerofit.training.hooks.install_accelerator",  # for subclasses, and the next ones by it
    "zerofit.training.batch.sample_groups.install_num_processes",
    "zerofit.training.step.accumulation.install_kept",
    "zerofit.training.step.backward.install_trigger",
    "zerofit.training.hooks.install_trainer",  # for subclasses
    "zerofit.training.hooks._install_accelerator",
    "zerofit.training.setup.trainer_arguments.install_arguments",  # by one of hooks.py, and for subclasses
    "zerofit.training.step.clipping.install_in_clip_grad",  # by one of hooks.py, after the steps
    "zerofit.training.wrapping.install_steps",
}


def test_the_steps_of_a_method_stand_in_this_order(golden: Callable[[str, str], None]) -> None:
    """The first is called first: who moves one changes what it sees."""
    lines = [
        f"{owner}.{method}: {', '.join(step.name for step in steps)}\n"
        for owner, table in _TABLES.items()
        for method, steps in table.items()
    ]
    golden("".join((*lines, "\nmodules:\n", *(f"  {hook.module}\n" for hook in MODULE_HOOKS))), "hooks.txt")


def test_every_hook_stands_in_a_list() -> None:
    """Functions named install*() or *wrappers() make hooks."""
    found = {
        ".".join(("zerofit.training", *path.relative_to(_FOLDER).with_suffix("").parts, node.name))
        for path in _FOLDER.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and (node.name.lstrip("_").startswith("install") or node.name.endswith("wrappers"))
    }
    steps = [step.wrappers for table in _TABLES.values() for each in table.values() for step in each]
    listed = {
        f"{function.__module__}.{function.__name__}"
        for function in (*steps, *(hook.install for hook in MODULE_HOOKS))
    }
    assert found == listed | _USED_ELSEWHERE


def _plans() -> Iterator[AppliedSettings]:
    """Yield settings of plans that together need every step."""
    whole: Any = {"lora": Lora(rank=2), "optimizer": OptimizerName.ADAMW, "compile": True}
    native = settings(gradient_accumulation_steps=2, gradient_clipping=1.0, group_by_length=True, **whole)
    engine = settings(uses_deepspeed=True, zero_stage=ZeroStage.PARAMETERS, **whole)
    steps = TrialSteps(num_warm_up=1, num_timed=1, guard="")
    yield replace(native, plan=replace(native.plan, topology=Topology(world_size=2), trial=steps))
    yield settings(micro_batch_size=1)
    for parallel in ("tensor_parallel_size", "sequence_parallel_size"):
        yield replace(engine, plan=replace(engine.plan, topology=Topology(world_size=2, **{parallel: 2})))
    sharded = settings(uses_fsdp2=True)
    yield replace(sharded, plan=replace(sharded.plan, topology=Topology(world_size=2)))
    pipeline = Topology(world_size=2, pipeline_parallel_size=2)
    yield replace(native, plan=replace(native.plan, topology=pipeline))


def test_every_step_has_a_plan_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_observed", SimpleNamespace(during=print))
    monkeypatch.setattr(stop_signal, "_stop", SimpleNamespace())
    unused = {
        f"{owner}.{method}: {step.name}"
        for owner, table in _TABLES.items()
        for method, steps in table.items()
        for step in steps
        if not any(method in step.wrappers(_OWNERS.get(owner), plan, quiet()) for plan in _plans())
    }
    assert unused == set()


class _Init:
    """DeepSpeed's class whose gathers wait for the last one alone."""

    def _allgather_params_coalesced(self, launch_handles: Any) -> None:
        launch_handles[-1].wait()


@pytest.mark.parametrize(
    ("uses_deepspeed", "on_cpu", "waits"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_every_gather_is_waited_for_on_cpu_ranks_under_deepspeed(
    *, uses_deepspeed: bool, on_cpu: bool, waits: bool
) -> None:
    wanted = settings(uses_deepspeed=uses_deepspeed)
    wanted = replace(wanted, plan=replace(wanted.plan, topology=Topology(on_cpu=on_cpu)))
    module = SimpleNamespace(Init=type("Init", (_Init,), {}))
    hooks._install_waiting_gathers(module, wanted, quiet())
    assert ("_allgather_params_coalesced" in vars(module.Init)) is waits


class _Saver:
    def save(self, *said: str) -> tuple[str, ...]:
        return (*said, "its own")


def _saying(word: str, *methods: str) -> Step:
    def wrapper(following: Any, saver: Any, *said: str) -> Any:
        return (*following(saver, *said, f"before {word}"), f"after {word}")

    return Step(word, lambda *_: dict.fromkeys(methods, wrapper), "")


def test_the_first_step_is_called_first_and_returns_last() -> None:
    steps = {"save": (_saying("first", "save"), _saying("left out"), _saying("second", "save"))}
    owner = type("Saver", (_Saver,), {})
    install_steps(steps, owner, settings(), quiet())
    assert owner().save() == ("before first", "before second", "its own", "after second", "after first")
    assert _Saver().save() == ("its own",)


def test_a_wrapper_of_a_method_without_its_step_is_refused() -> None:
    with pytest.raises(AssertionError, match="load"):
        install_steps({"save": (_saying("first", "save", "load"),)}, _Saver, settings(), quiet())


class _Preparing:
    def prepare_optimizer(self, optimizer: Any) -> Any:
        return optimizer


@pytest.mark.parametrize(
    ("only", "calls"), [({}, ["before", "step"]), ({"only": lambda *_: False}, ["step"])]
)
def test_the_step_of_an_optimizer_is_replaced_once_however_often_it_is_prepared(
    only: dict[str, Any], calls: list[str]
) -> None:
    done: list[str] = []

    def around(accelerator: Any, prepared: Any, original: Any) -> None:
        done.append("before")
        original()

    owner: Any = type("Accelerator", (_Preparing,), {})
    wrap(owner, "prepare_optimizer", around_steps("_zerofit_test", around, **only))
    optimizer = SimpleNamespace(step=lambda: done.append("step"))
    for _ in range(2):
        assert owner().prepare_optimizer(optimizer) is optimizer
    optimizer.step()
    assert done == calls


@pytest.mark.parametrize(("world_size", "is_corrected"), [(1, False), (2, True), (8, True)])
def test_generate_is_corrected_for_two_ranks_and_more(world_size: int, *, is_corrected: bool) -> None:
    (hook,) = (hook for hook in MODULE_HOOKS if hook.module == "transformers.generation.utils")
    mixin = type("GenerationMixin", (), {"generate": lambda self: None})
    before, alone = mixin.__dict__["generate"], settings()
    plan = replace(alone.plan, topology=Topology(world_size=world_size, on_cpu=True))
    module: Any = SimpleNamespace(GenerationMixin=mixin, is_deepspeed_zero3_enabled=lambda: False)
    hook.install(module, replace(alone, plan=plan), quiet())
    assert (mixin.__dict__["generate"] is not before) is is_corrected
