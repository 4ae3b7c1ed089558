"""A model and the random states are as before when generation has ended, also with an error."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from random_cases import Family
from tiny_models import make_model

from zerofit import generate

_PROMPTS = [[3, 4, 5], [6]]


def _state(model: Any) -> dict[str, Any]:
    import torch

    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "checkpointing": {
            name: (module.gradient_checkpointing, getattr(module, "_gradient_checkpointing_func", None))
            for name, module in model.named_modules()
            if hasattr(module, "gradient_checkpointing")
        },
        "attributes": set(model.__dict__),
        "own settings": id(model.generation_config),
        "values of settings": copy.deepcopy(model.generation_config.to_dict()),
        "configuration": model.config.to_dict(),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "numpy": numpy.random.get_state()[1].tolist(),
        "gradients": torch.is_grad_enabled(),
    }


def _trained_model() -> Any:
    model = make_model(Family.GPT2, is_tied=True, weight_seed=0)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.generation_config.max_length = 30
    model.train()
    model.transformer.h[0].eval()
    return model


def test_a_model_in_training_is_left_as_it_was() -> None:
    model = _trained_model()
    before = _state(model)
    generate(model, _PROMPTS, max_new_tokens=4, do_sample=True, cache_implementation="static")
    assert _state(model) == before


def test_a_model_on_the_cpu_seeds_no_gpu_that_is_used_later() -> None:
    import torch

    model = _trained_model()
    queued = list(torch.cuda._lazy_seed_tracker.get_calls())
    generate(model, _PROMPTS, max_new_tokens=2, do_sample=True)
    assert torch.cuda._lazy_seed_tracker.get_calls() == queued


def test_every_device_of_an_accelerator_gets_its_random_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    states = [1, 2]
    module = SimpleNamespace(
        is_initialized=lambda: True,
        get_rng_state_all=lambda: list(states),
        set_rng_state_all=lambda found: states.__setitem__(slice(None), found),
    )
    monkeypatch.setattr(torch, "npu", module, raising=False)

    def draw(input_ids: Any, scores: Any) -> Any:
        states[:] = [8, 9]
        return scores

    generate(_trained_model(), _PROMPTS, max_new_tokens=2, logits_processor=[draw])
    assert states == [1, 2]


def test_a_model_is_left_as_it_was_after_an_error() -> None:
    model = _trained_model()
    before = _state(model)

    def fail(*_: Any) -> Any:
        random.random()
        raise RuntimeError("of the script")

    with pytest.raises(RuntimeError, match="of the script"):
        generate(model, _PROMPTS, max_new_tokens=4, logits_processor=[fail])
    assert _state(model) == before


def test_a_model_in_training_generates_as_one_in_evaluation() -> None:
    evaluated = make_model(Family.GPT2, is_tied=True, weight_seed=0)
    assert generate(_trained_model(), _PROMPTS, max_new_tokens=8) == generate(
        evaluated, _PROMPTS, max_new_tokens=8
    )
