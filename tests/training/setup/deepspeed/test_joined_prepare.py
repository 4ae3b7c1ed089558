"""What stands for a model until its optimizer comes, and what one Accelerator keeps of earlier trainings."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerators import own_class, quiet, settings, wrap_all
from refusals import refusal

from zerofit.training.setup.deepspeed import joined_prepare

pytestmark = pytest.mark.usefixtures("no_earlier_optimizers")


class Engine(torch.nn.Module):
    """Stands for DeepSpeed's."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


class State:
    """An AcceleratorState with DeepSpeed."""

    def __init__(self, own: Any, zero_stage: int) -> None:
        self._own = own
        self.deepspeed_plugin = SimpleNamespace(zero_stage=zero_stage, enable_msamp=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def accelerator(zero_stage: int = 2) -> Any:
    """Return an Accelerator under the hook, whose prepare() makes engines as DeepSpeed's does."""

    class Planned(own_class()):  # type: ignore[misc]
        def prepare(self, *objects: Any) -> Any:
            models = [item for item in objects if isinstance(item, torch.nn.Module)]
            optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
            if models and not optimizers:
                raise ValueError("zero stage 2 requires an optimizer")
            if models:
                self.deepspeed_engine_wrapped = SimpleNamespace(engine=SimpleNamespace(destroy=lambda: None))
            made = [Engine(item) if item in models else SimpleNamespace(optimizer=item) for item in objects]
            return tuple(made) if len(made) > 1 else made[0]

    wrap_all(Planned, joined_prepare.wrappers(Planned, settings(uses_deepspeed=True), quiet()))
    made: Any = Planned()
    made.deepspeed_engine_wrapped = None
    made.state = State(made.state, zero_stage)
    return made


def parts() -> tuple[Any, Any]:
    model = torch.nn.Linear(2, 1)
    model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_model_without_its_optimizer_shows_what_the_script_looks_at() -> None:
    own = accelerator()
    model = torch.nn.Linear(2, 1)
    model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    waits = own.prepare(model)
    assert waits.config.use_cache
    assert waits.weight is model.weight
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = waits.no_such_field
    with torch.no_grad():
        waits(torch.ones(1, 2))
    assert refusal(waits, torch.ones(1, 2)).rule == "optimizer-not-prepared"


def test_an_optimizer_joins_the_model_that_it_trains() -> None:
    own = accelerator()
    models = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    first, second = (own.prepare(model) for model in models)
    own.prepare(torch.optim.SGD(models[1].parameters(), lr=0.1))
    assert (type(first).__name__, type(second).__name__) == ("ModelWithoutOptimizer", "Engine")
    assert second.module is models[1]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("by_kind", [True, False])
def test_a_teacher_needs_no_engine(is_first: bool, by_kind: bool) -> None:
    own, teacher = accelerator(), torch.nn.Linear(2, 1)
    model, optimizer = parts()
    if not is_first:
        own.prepare(model, optimizer)
    if by_kind:
        assert own.prepare_model(teacher, evaluation_mode=True) is teacher
    else:
        assert own.prepare(teacher.requires_grad_(False)) is teacher
    if is_first:
        assert type(own.prepare(model, optimizer)[0]).__name__ == "Engine"


@pytest.mark.parametrize("release", ["free_memory", "clear"])
def test_a_training_leaves_no_optimizer_behind(release: str) -> None:
    own, held = accelerator(), []
    for _ in range(3):
        model, optimizer = parts()
        held.append(weakref.ref(optimizer))
        prepared = own.prepare(optimizer), own.prepare(model)
        assert type(prepared[1]).__name__ == "Engine"
        prepared = model = optimizer = None  # type: ignore[assignment]
        getattr(own, release)()
        gc.collect()
    assert [one() for one in held] == [None] * 3


def test_a_model_and_an_optimizer_that_are_prepared_by_kind_join_too() -> None:
    """accelerate's own methods return both as they are."""
    own = accelerator()
    model, optimizer = parts()
    own.prepare_optimizer(optimizer)
    assert type(own.prepare_model(model)).__name__ == "Engine"
