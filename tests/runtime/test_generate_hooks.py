"""Calls of model.generate are corrected where ZeRO-3 holds the model in parts, and nowhere else."""

from __future__ import annotations

import types
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest

from zerofit.errors import UserError
from zerofit.generation.meeting import arranged
from zerofit.runtime.changes import Changes
from zerofit.runtime.generate_hooks import install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Status(Enum):
    """As deepspeed/runtime/zero/partition_parameters.py has it."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2


class _Parameter:
    ds_process_group = None

    def __init__(self, status: _Status | None) -> None:
        if status is not None:
            self.ds_status = status


class DeepSpeedHybridEngine:
    """An engine that has put its own generate in front."""

    def generate(self) -> None: ...


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Be rank 0 of two, of which the other never answers."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def hooked() -> Callable[..., tuple[Any, Changes]]:
    """Return a function that makes a model whose hooked generate returns what it was given."""

    def make(status: _Status | None, *, zero3_is_enabled: bool = False) -> tuple[Any, Changes]:
        class Mixin:
            generation_config = types.SimpleNamespace(prefill_chunk_size=None)

            def generate(
                self,
                inputs: Any = None,
                generation_config: Any = None,
                synced_gpus: Any = None,
                **kwargs: Any,
            ) -> Any:
                return synced_gpus

            def parameters(self) -> list[_Parameter]:
                return [_Parameter(_Status.AVAILABLE if status else None), _Parameter(status)]

        module: Any = types.ModuleType("utils")
        module.GenerationMixin = Mixin
        module.is_deepspeed_zero3_enabled = lambda: zero3_is_enabled
        changes = Changes(announce=False)
        install(module, changes, limit_s=30)
        return Mixin(), changes

    return make


def _noted(call: str) -> str:
    return f": {call} under ZeRO-3 would leave ranks waiting for longer completions: synced_gpus=True"


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("status", "enabled", "arguments", "settings", "synced", "note"),
    [
        pytest.param(
            _Status.NOT_AVAILABLE,
            False,
            (),
            {"synced_gpus": False},
            True,
            _noted("generate(synced_gpus=False)"),
            id="said False",
        ),
        pytest.param(
            _Status.NOT_AVAILABLE,
            True,
            (None, None, False),
            {"max_new_tokens": 3},
            True,
            _noted("generate(synced_gpus=False)"),
            id="said False by its place",
        ),
        pytest.param(
            _Status.NOT_AVAILABLE, False, (), {}, True, _noted("generate()"), id="an engine made by hand"
        ),
        pytest.param(_Status.NOT_AVAILABLE, True, (), {}, True, None, id="transformers sets it by itself"),
        pytest.param(_Status.NOT_AVAILABLE, False, (), {"synced_gpus": True}, True, None, id="said True"),
        pytest.param(_Status.AVAILABLE, True, (), {"synced_gpus": False}, False, None, id="gathered"),
        pytest.param(_Status.AVAILABLE, True, (), {}, None, None, id="gathered, nothing said"),
        pytest.param(None, False, (), {"synced_gpus": False}, False, None, id="no ZeRO-3"),
        pytest.param(None, False, (), {}, None, None, id="no ZeRO-3, nothing said"),
    ],
)
def test_a_partitioned_model_generates_in_step(
    status: _Status | None,
    enabled: bool,
    arguments: tuple[Any, ...],
    settings: dict[str, Any],
    synced: bool | None,
    note: str | None,
    hooked: Callable[..., tuple[Any, Changes]],
) -> None:
    model, changes = hooked(status, zero3_is_enabled=enabled)
    assert model.generate(*arguments, **settings) is synced
    assert len(changes.lines) == (note is not None)
    assert all(line.endswith(str(note)) and "test_generate_hooks.py:" in line for line in changes.lines)


@pytest.mark.usefixtures("two_ranks")
def test_a_call_that_the_ranks_have_agreed_on_is_left_alone(
    hooked: Callable[..., tuple[Any, Changes]],
) -> None:
    model, changes = hooked(_Status.NOT_AVAILABLE)
    with arranged():
        assert model.generate(synced_gpus=False, prefill_chunk_size=4) is False
    assert not changes.lines


@pytest.mark.usefixtures("two_ranks")
def test_the_hybrid_engines_own_call_is_left_alone(hooked: Callable[..., tuple[Any, Changes]]) -> None:
    model, changes = hooked(_Status.NOT_AVAILABLE)
    inner = model.generate
    model.generate = DeepSpeedHybridEngine().generate
    assert inner(synced_gpus=False) is False
    assert not changes.lines


def test_one_rank_is_left_alone(hooked: Callable[..., tuple[Any, Changes]]) -> None:
    model, changes = hooked(_Status.NOT_AVAILABLE)
    assert model.generate(synced_gpus=False) is False
    assert not changes.lines


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"prefill_chunk_size": 4}, "generate(prefill_chunk_size=4)"),
        ({"assistant_model": types.SimpleNamespace()}, "generate(assistant_model=SimpleNamespace)"),
        ({"generation_config": types.SimpleNamespace(use_mtp=True)}, "generate(use_mtp=True)"),
        ({"assistant_early_exit": 2}, "generate(assistant_early_exit=2)"),
        ({"cache_implementation": "paged"}, "generate(cache_implementation=paged)"),
        ({"cache_implementation": "static"}, None),
        ({"prompt_lookup_num_tokens": 3}, None),
        ({"generation_config": types.SimpleNamespace(use_mtp=False)}, None),
    ],
)
def test_settings_that_take_ranks_out_of_step_are_refused(
    settings: dict[str, Any], found: str | None, hooked: Callable[..., tuple[Any, Changes]]
) -> None:
    model, _ = hooked(_Status.NOT_AVAILABLE)
    if found is None:
        assert model.generate(**settings) is True
        return
    with pytest.raises(UserError) as refused:
        model.generate(**settings)
    assert refused.value.rule == "generate-passes-differ"
    assert refused.value.found.endswith(f": {found}")
    unpartitioned, _ = hooked(None)
    assert unpartitioned.generate(**settings) is None
