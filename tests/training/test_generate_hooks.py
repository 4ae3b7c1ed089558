"""Calls of model.generate are corrected where ZeRO-3 holds the model in parts, and nowhere else."""

from __future__ import annotations

import types
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
import torch
from refusals import refusal

from zerofit.ranks.meeting import arranged
from zerofit.training import generate_hooks
from zerofit.training.changes import Changes
from zerofit.training.generate_hooks import install

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Status(Enum):
    """As deepspeed/runtime/zero/partition_parameters.py has it."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2


def _partitioned(status: _Status | None, *, has_hooks: bool) -> Any:
    """Return a module with a weight as ZeRO-3 leaves it; status None is without ZeRO-3."""
    module = torch.nn.Linear(1, 1, bias=False)
    if status is not None:
        weight: Any = module.weight
        weight.ds_id, weight.ds_status, weight.ds_process_group = 0, status, None
    if has_hooks:
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

        offload = DeepSpeedZeRoOffload.__new__(DeepSpeedZeRoOffload)
        module.register_forward_pre_hook(lambda *_: offload)
    return module


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


class _Mixin(torch.nn.Module):
    """A model whose generate returns what it was given."""

    generation_config = types.SimpleNamespace(prefill_chunk_size=None)

    def generate(
        self, inputs: Any = None, generation_config: Any = None, synced_gpus: Any = None, **kwargs: Any
    ) -> Any:
        return synced_gpus


def hooked(
    status: _Status | None, *, zero3_is_enabled: bool = False, has_hooks: bool | None = None
) -> tuple[Any, Changes]:
    """Return a model whose generate is hooked, and what is noted."""
    module: Any = types.ModuleType("utils")
    module.GenerationMixin = type("Mixin", (_Mixin,), {})
    module.is_deepspeed_zero3_enabled = lambda: zero3_is_enabled
    changes = Changes(announce=False)
    install(module, changes, limit_s=30)
    model = module.GenerationMixin()
    hooks = status is _Status.NOT_AVAILABLE if has_hooks is None else has_hooks
    model.layer = _partitioned(status, has_hooks=hooks)
    return model, changes


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
        pytest.param(
            _Status.AVAILABLE, True, (), {"synced_gpus": False}, False, None, id="gathered, hooks off"
        ),
        pytest.param(_Status.AVAILABLE, True, (), {}, None, None, id="gathered, hooks off, nothing said"),
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
) -> None:
    model, changes = hooked(status, zero3_is_enabled=enabled)
    assert model.generate(*arguments, **settings) is synced
    assert len(changes.lines) == (note is not None)
    assert all(line.endswith(str(note)) and "test_generate_hooks.py:" in line for line in changes.lines)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("said", "enabled", "meets"),
    [(True, False, True), (None, True, True), (None, False, False), (False, True, False)],
)
def test_ranks_meet_before_each_call_in_step_whoever_put_it_there(
    said: bool | None,
    enabled: bool,
    meets: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[str] = []
    monkeypatch.setattr(generate_hooks, "meet", lambda name, **_: met.append(name))
    model, changes = hooked(None, zero3_is_enabled=enabled)
    assert model.generate(synced_gpus=said) is said
    assert len(met) == meets
    assert not changes.lines


@pytest.mark.usefixtures("two_ranks")
def test_a_call_that_the_ranks_have_agreed_on_is_left_alone() -> None:
    model, changes = hooked(_Status.NOT_AVAILABLE)
    with arranged():
        assert model.generate(synced_gpus=False, prefill_chunk_size=4) is False
    assert not changes.lines


@pytest.mark.usefixtures("two_ranks")
def test_the_hybrid_engines_own_call_is_left_alone() -> None:
    model, changes = hooked(_Status.NOT_AVAILABLE)
    inner = model.generate
    model.generate = DeepSpeedHybridEngine().generate
    assert inner(synced_gpus=False) is False
    assert not changes.lines


def test_one_rank_is_left_alone() -> None:
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
        ({"guidance_scale": 1.5}, "generate(guidance_scale=1.5)"),
        ({"guidance_scale": 1}, None),
        ({"token_healing": True}, "generate(token_healing=True)"),
        ({"custom_generate": "a/repository"}, "generate(custom_generate=a/repository)"),
        ({"generation_config": types.SimpleNamespace(penalty_alpha=0.6)}, "generate(penalty_alpha=0.6)"),
        ({"prompt_lookup_num_tokens": 3}, None),
        ({"generation_config": types.SimpleNamespace(use_mtp=False)}, None),
    ],
)
def test_settings_that_take_ranks_out_of_step_are_refused(
    settings: dict[str, Any], found: str | None
) -> None:
    model, _ = hooked(_Status.NOT_AVAILABLE)
    if found is None:
        assert model.generate(**settings) is True
        return
    refused = refusal(model.generate, **settings)
    assert refused.rule == "generate-passes-differ"
    assert refused.found.endswith(f": {found}")
    unpartitioned, _ = hooked(None)
    assert unpartitioned.generate(**settings) is None


@pytest.mark.usefixtures("two_ranks")
def test_weights_that_the_script_gathered_go_in_step_while_zeros_hooks_are_on() -> None:
    model, changes = hooked(_Status.AVAILABLE, has_hooks=True)
    assert model.generate(synced_gpus=False) is True
    assert len(changes.lines) == 1


@pytest.mark.usefixtures("two_ranks")
def test_separate_experts_are_refused_by_the_line_of_the_call() -> None:
    model, _ = hooked(_Status.NOT_AVAILABLE)
    model.experts = torch.nn.ModuleDict({"first": torch.nn.Linear(1, 1)})
    refused = refusal(lambda: model.generate())  # its line is the one that is named
    assert refused.rule == "generate-experts-apart"
    assert "test_generate_hooks.py:" in refused.found
