"""What the guard of a ZeRO engine lets a script read and write, and when it looks and asks other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerators import quiet
from refusals import refusal

from zerofit.core.upstream.zero_fragments import Fragment
from zerofit.training.step.deepspeed import script_gradients, script_weights
from zerofit.training.step.deepspeed.guard import Guard, _ScriptGroups
from zerofit.training.step.deepspeed.untrained_parameters import UntrainedParameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Model(torch.nn.Module):
    """Has a weight, as ZeRO-3 leaves it between passes or whole, and computes without it."""

    def __init__(self, zero_stage: int) -> None:
        super().__init__()
        self.weight: Any = torch.nn.Parameter(torch.ones(4))
        if zero_stage == 3:
            self.weight = torch.nn.Parameter(torch.empty(0))
            self.weight.ds_id, self.weight.ds_tensor = 0, torch.ones(4)
            self.weight.ds_status = SimpleNamespace(name="NOT_AVAILABLE")

    def forward(self, inputs: Any) -> Any:
        return inputs * 2


class _Engine(torch.nn.Module):
    """What the guard asks of a DeepSpeedEngine, whose steps do nothing."""

    skipped_steps = 0
    device = "cpu"
    _config = SimpleNamespace(zero_config=SimpleNamespace())

    def __init__(self, zero_stage: int) -> None:
        super().__init__()
        self.module = _Model(zero_stage)
        self.zero_optimization_stage = lambda: zero_stage
        self.zero_optimization_partition_weights = lambda: zero_stage == 3
        base = torch.optim.SGD(self.module.parameters(), lr=0.1)
        saving = {"state_dict": base.state_dict, "load_state_dict": base.load_state_dict}
        self.optimizer = SimpleNamespace(optimizer=base, grad_position={}, **saving)

    def forward(self, inputs: Any) -> Any:
        return self.module(inputs)

    def _take_model_step(self) -> None:
        pass

    save_checkpoint = save_16bit_model = _zero3_consolidated_16bit_state_dict = _take_model_step

    def load_checkpoint(self) -> None:
        """Copy nothing into what stands for a sharded weight, as ZeRO-3 does."""
        torch.autograd.graph.increment_version(self.module.weight)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], tuple[Any, Guard]]]:
    """Return a function that makes an engine of a ZeRO stage and its guard, and undo what it changes."""
    for name in ("data", "grad"):
        monkeypatch.setattr(torch.nn.Parameter, name, getattr(torch.Tensor, name))
    monkeypatch.setattr(torch.autograd, "grad", torch.autograd.grad)
    script_gradients._replace_properties.cache_clear()
    guards = []

    def make(zero_stage: int) -> tuple[Any, Guard]:
        engine = _Engine(zero_stage)
        own = engine.optimizer.optimizer
        guards.append(Guard(engine, [(own, [list(engine.module.parameters())])], quiet()))
        return engine, guards[-1]

    yield make
    for guard in guards:
        guard._reads.end()
    script_gradients._replace_properties.cache_clear()


def test_until_the_first_step_a_script_may_print_the_shapes_of_sharded_weights(
    guarded: Callable[[int], tuple[Any, Guard]],
) -> None:
    engine, _ = guarded(3)
    weight = engine.module.weight
    for _ in range(2):
        assert weight.shape == (0,)
        engine(torch.ones(1))
    engine._take_model_step()
    for _ in range(2):
        assert refusal(lambda: weight.shape).rule == "weight-sharded-by-zero3"
        engine(torch.ones(1))


def _sum_of(weight: Any) -> Any:
    return weight.sum()


def test_a_read_of_a_sharded_weight_is_told_by_the_line_that_reads(
    guarded: Callable[[int], tuple[Any, Guard]],
) -> None:
    engine, _ = guarded(3)
    line = _sum_of.__code__.co_firstlineno + 1
    assert refusal(_sum_of, engine.module.weight).found == f"weight in {__file__}:{line}"


def test_gradients_are_refused_from_a_backward_pass_until_they_are_zeroed(
    guarded: Callable[[int], tuple[Any, Guard]],
) -> None:
    engine, guard = guarded(2)
    weight = engine.module.weight
    for _ in range(2):
        assert weight.grad is None
        guard.begin_backward()
        assert refusal(lambda: weight.grad).rule == "gradients-by-hand-under-zero"
        engine.zero_grad()


def _write(weight: Any, gradient: Any) -> None:
    weight.grad = gradient


def test_a_gradient_may_be_dropped_before_there_is_one_and_never_written(
    guarded: Callable[[int], tuple[Any, Guard]],
) -> None:
    engine, guard = guarded(2)
    weight = engine.module.weight
    weight.grad = None
    refused = refusal(_write, weight, torch.ones(4))
    assert refused.rule == "gradients-by-hand-under-zero"
    assert "the script writes a gradient, which ZeRO-2 has moved elsewhere" in str(refused)
    guard.begin_backward()
    assert refusal(_write, weight, None).rule == "gradients-by-hand-under-zero"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_sharded_weight_may_be_read_after_a_pass_that_trains_nothing(
    training: bool, has_gradients: bool, guarded: Callable[[int], tuple[Any, Guard]]
) -> None:
    engine, _ = guarded(3)
    engine._take_model_step()
    engine.train(training)
    with torch.set_grad_enabled(has_gradients):
        engine(torch.ones(1))
    if training and has_gradients:
        assert refusal(lambda: engine.module.weight.shape).rule == "weight-sharded-by-zero3"
    else:
        assert engine.module.weight.shape == (0,)


def test_a_weight_that_is_changed_and_written_again_counts_as_changed_until_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(), _config=SimpleNamespace(zero_config=SimpleNamespace())
    )
    changed, same = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    fragments = {
        id(weight): Fragment(weights=weight.detach(), master=torch.ones(2), states=())
        for weight in (changed, same)
    }
    monkeypatch.setattr(script_weights, "fragment_of", lambda _, weight: fragments[id(weight)])
    weights = script_weights.ScriptWeights(engine, [("changed", changed), ("same", same)], quiet())
    with torch.no_grad():
        changed.add_(1)
        same.mul_(1)
        weights.check(1)
        changed.mul_(1)
        weights.check(1)
    assert fragments[id(changed)].master.tolist() == [2, 2]
    taken = weights.take_written()
    assert {
        name: taken[id(weight)].is_changed for name, weight in (("changed", changed), ("same", same))
    } == {
        "changed": True,
        "same": False,
    }
    assert weights.take_written() == {}


def test_weights_are_compared_after_each_of_the_first_steps_and_then_every_fifty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SimpleNamespace(_config=SimpleNamespace(zero_config=SimpleNamespace()))
    weights = script_weights.ScriptWeights(engine, [("weight", torch.nn.Parameter(torch.ones(1)))], quiet())
    compared: list[int] = []
    monkeypatch.setattr(script_weights, "fragment_of", lambda *_: compared.append(step))
    for step in range(121):
        for _ in range(3):  # passes of one accumulation window
            weights.check(step)
    assert compared == [*range(1, 11), 50, 100]


@pytest.mark.parametrize(("num_ranks", "num_asked"), [(1, 0), (2, 3)])
def test_a_process_alone_asks_nobody_for_gradients(
    num_ranks: int, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def all_reduce(flags: Any, **_: Any) -> Any:
        asked.append(flags)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_ranks)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    parameter = torch.nn.Parameter(torch.ones(1))
    untrained = UntrainedParameters(_Engine(2), [("weight", parameter)], quiet())
    for step in range(3):
        untrained.begin_step(step, {})
        untrained.end_step()
    assert len(asked) == num_asked


def test_what_deepspeed_loads_into_a_sharded_weight_is_not_the_scripts(
    guarded: Callable[[int], tuple[Any, Guard]],
) -> None:
    engine, _ = guarded(3)
    engine.load_checkpoint()
    engine(torch.ones(1))
    torch.autograd.graph.increment_version(engine.module.weight)
    assert refusal(engine, torch.ones(1)).rule == "weights-written-under-zero3"


def _fail_in_the_first_group(optimizer: Any) -> None:
    """Fail as DeepSpeed's step, which gives its optimizer one group at a time (stage_1_and_2.py)."""
    optimizer.param_groups = [optimizer.param_groups[0]]
    raise torch.OutOfMemoryError


def test_a_step_that_is_out_of_memory_fails_by_its_own_error_and_leaves_all_groups() -> None:
    flat, own = [[[torch.nn.Parameter(torch.ones(1))] for _ in range(2)] for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters} for parameters in flat], lr=0.1)
    groups = _ScriptGroups(optimizer, own)
    with pytest.raises(torch.OutOfMemoryError), groups.flat():
        _fail_in_the_first_group(optimizer)
    assert [group["params"] for group in optimizer.param_groups] == own
    with groups.flat():
        assert [group["params"] for group in optimizer.param_groups] == flat
