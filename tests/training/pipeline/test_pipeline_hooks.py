"""Hooks of a pipeline on an Accelerator and a Trainer: what they refuse, gather, and load to host memory."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerators import quiet, wrap_all
from refusals import refusal

from zerofit.training.pipeline import hooks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SETTINGS: Any = SimpleNamespace(pipeline_parallel_size=2)


class _Accelerator:
    """What of accelerate's class the hooks wrap."""

    def __init__(self, mixed_precision: str = "no") -> None:
        self.mixed_precision = mixed_precision
        self._optimizers: list[Any] = []

    def prepare(self, *args: Any) -> tuple[Any, ...]:
        self._optimizers += [
            SimpleNamespace(optimizer=one) for one in args if isinstance(one, torch.optim.Optimizer)
        ]
        return args

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> bool:
        return evaluation_mode

    def get_state_dict(self, model: Any) -> str:
        return "its own"

    def save_state(self) -> None:
        pass

    def load_state(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs


class _Trainer:
    """What of transformers' class the hooks wrap."""

    def __init__(self, model: Any = None, *, save_only_model: bool = False) -> None:
        self.args = SimpleNamespace(save_only_model=save_only_model)

    def save_model(self) -> None:
        pass

    def _save_checkpoint(self) -> None:
        self.save_model()

    def _load_optimizer_and_scheduler(self, path: Path) -> Any:
        return torch.load(path, map_location="meta")

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool) -> bool:
        return bool(hooks._running[0].pipeline.gives_logits)


class _Running:
    """A pipeline of a model, which notes what is asked of it."""

    def __init__(self, model: Any) -> None:
        self.pipeline = SimpleNamespace(model=model, gives_logits=True)
        self.asked: list[Any] = []

    @contextlib.contextmanager
    def gathered(self, call: str, *, optimizers: bool) -> Iterator[None]:
        self.asked.append("all" if optimizers else "weights")
        yield

    def weights(self, call: str) -> str:
        return "of all stages"

    def has(self, parameter: Any) -> bool:
        return any(parameter is own for own in self.pipeline.model.parameters())

    def cut_optimizer(self, optimizer: Any) -> None:
        self.asked.append(optimizer)

    def wrap_optimizers(self) -> None:
        self.asked.append("taken over")


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> _Running:
    """A pipeline that is made already."""
    found = _Running(torch.nn.Linear(2, 2))
    monkeypatch.setattr(hooks, "_running", [found])
    return found


@pytest.fixture
def accelerator_class() -> Any:
    """A class of its own with the hooks."""
    kind = type("Accelerator", (_Accelerator,), {})
    wrap_all(kind, hooks.wrappers(kind, _SETTINGS, quiet()))
    return kind


@pytest.fixture
def trainer_class() -> Any:
    """A class of its own with the hooks."""
    kind = type("Trainer", (_Trainer,), {})
    wrap_all(kind, hooks.trainer_wrappers(kind, _SETTINGS, quiet()))
    return kind


def test_a_script_that_trains_in_fp16_is_refused_as_it_makes_its_accelerator(accelerator_class: Any) -> None:
    assert refusal(lambda: accelerator_class("fp16")).rule == "pipeline-trains-in-fp16"
    assert accelerator_class("bf16").mixed_precision == "bf16"


def test_states_are_loaded_to_host_memory(accelerator_class: Any, trainer_class: Any, tmp_path: Path) -> None:
    assert accelerator_class().load_state() == {"map_location": "cpu"}
    assert accelerator_class().load_state(map_location="on_device") == {"map_location": "on_device"}
    torch.save(torch.ones(1), tmp_path / "state")
    loaded = trainer_class()._load_optimizer_and_scheduler(tmp_path / "state")
    assert loaded.device.type == "cpu"
    assert torch.load(tmp_path / "state", map_location="meta").device.type == "meta"


@pytest.mark.parametrize(
    ("save_only_model", "save", "gathered"),
    [
        (False, "save_model", ["weights"]),
        (False, "_save_checkpoint", ["all", "weights"]),
        (True, "_save_checkpoint", ["weights", "weights"]),
    ],
)
def test_optimizer_states_are_gathered_for_checkpoints_alone(
    save_only_model: bool, save: str, gathered: list[str], trainer_class: Any, running: _Running
) -> None:
    getattr(trainer_class(running.pipeline.model, save_only_model=save_only_model), save)()
    assert running.asked == gathered


def test_a_second_trainer_may_evaluate_another_model_and_not_train_it(
    accelerator_class: Any, trainer_class: Any, running: _Running
) -> None:
    judge = torch.nn.Linear(2, 2)
    trainer_class(judge)
    assert not accelerator_class().prepare_model(judge)
    assert refusal(lambda: accelerator_class().prepare(judge)).rule == "pipeline-second-model"
    judge.requires_grad_(False)
    assert accelerator_class().prepare(judge) == (judge,)


def test_an_optimizer_that_is_prepared_before_its_model_is_cut_with_it(
    accelerator_class: Any, running: _Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.SGD(running.pipeline.model.parameters(), lr=0.1)
    accelerator = accelerator_class()
    with monkeypatch.context() as before:
        before.setattr(hooks, "_running", [])
        accelerator.prepare(optimizer)
    accelerator.prepare(running.pipeline.model)
    assert running.asked == [optimizer, "taken over"]


def test_a_compiled_pipeline_saves_whole_weights_and_says_that_it_is_not_compiled(running: _Running) -> None:
    kind, changes = type("Accelerator", (_Accelerator,), {}), quiet()
    wrap_all(kind, hooks.wrappers(kind, _SETTINGS, changes))
    kind().prepare(running.pipeline.model)
    kind().prepare(torch.compile(torch.nn.Linear(2, 2).requires_grad_(False), backend="eager"))
    assert not changes.lines
    compiled = torch.compile(running.pipeline.model, backend="eager")
    kind().prepare(compiled)
    assert changes.lines == (
        "torch.compile does nothing to a model in pipeline stages, which run uncompiled",
    )
    assert kind().get_state_dict(compiled) == "of all stages"
    assert kind().get_state_dict(torch.nn.Linear(2, 2)) == "its own"


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_norm_is_of_all_stages_for_the_pipelines_own_parameters_alone(
    running: _Running, *, is_alone: bool
) -> None:
    asked: list[Any] = []
    utils: Any = SimpleNamespace(clip_grad_norm_=lambda held, *rest: asked.append((held, rest)))
    wrap_all(utils, hooks.clipping_wrappers(utils, _SETTINGS, quiet()))
    others = torch.nn.Linear(2, 2)
    given = others.weight if is_alone else others.parameters()
    held = [others.weight] if is_alone else [others.weight, others.bias]
    utils.clip_grad_norm_(given, 0.5)
    assert asked == [(held, (0.5, 2.0, False, None))]


def test_logits_stay_on_the_last_stage_where_a_trainer_wants_the_loss_alone(
    trainer_class: Any, running: _Running
) -> None:
    trainer = trainer_class()
    assert trainer.prediction_step(running.pipeline.model, {}, True) is False
    assert trainer.prediction_step(running.pipeline.model, {}, False) is True
    assert trainer.prediction_step(torch.nn.Linear(2, 2), {}, True) is True
    assert running.pipeline.gives_logits
