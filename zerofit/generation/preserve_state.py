"""Restores a model and the random states after generation, also after errors."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from zerofit.core.upstream.transformers import KEPT_BY_GENERATE

_FLAGS = ("training", "gradient_checkpointing")
"""Attributes of transformers' layers that affect computation and caching."""
_ACCELERATORS = ("cuda", "xpu", "npu")
"""torch's modules with random states for each device of the process."""
_MISSING = object()


@contextmanager
def untouched(generator: Any, model: Any) -> Iterator[None]:
    """Switch to evaluation without checkpointing and gradients; restore everything, also after errors."""
    import torch

    with ExitStack() as undo:
        undo.callback(_flags_of(generator))
        for module in {id(each): each for each in (generator, model)}.values():
            undo.callback(_attributes_of(module))
        undo.callback(_random_states())
        # Weights that ZeRO-3 gathers in inference mode could never be trained again.
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.no_grad())
        for module in generator.modules():
            module.training = False
            if getattr(module, "gradient_checkpointing", False) is True:
                module.gradient_checkpointing = False
        yield


def _flags_of(generator: Any) -> Callable[[], None]:
    before = [
        (module, name, module.__dict__[name])
        for module in generator.modules()
        for name in _FLAGS
        if name in module.__dict__
    ]

    def put_back() -> None:
        for module, name, value in before:
            setattr(module, name, value)

    return put_back


def _attributes_of(module: Any) -> Callable[[], None]:
    """Return a function that restores the attributes that generate() sets on a model, and its settings."""
    names = ("generation_config", "prepare_inputs_for_generation", *KEPT_BY_GENERATE)
    before = {name: module.__dict__.get(name, _MISSING) for name in names}
    use_cache = getattr(module.config, "use_cache", _MISSING)

    def put_back() -> None:
        for name, value in before.items():
            if value is not _MISSING:
                module.__dict__[name] = value
            else:
                module.__dict__.pop(name, None)
        if use_cache is not _MISSING:
            module.config.use_cache = use_cache

    return put_back


def _random_states() -> Callable[[], None]:
    import torch

    python, cpu = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    modules = [getattr(torch, name) for name in _ACCELERATORS if hasattr(torch, name)]
    accelerators = [(each, each.get_rng_state_all()) for each in modules if each.is_initialized()]

    def put_back() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        for module, states in accelerators:
            module.set_rng_state_all(states)

    return put_back


def seed_sampling(seed: int, device: Any) -> None:
    """Seed the random numbers for one model's device, and no other.

    torch.manual_seed() would seed all, including devices that this process begins to use later.
    """
    import torch

    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        module = getattr(torch, device.type)
        with module.device(device) if hasattr(module, "device") else nullcontext():  # MPS is a single device
            module.manual_seed(seed)
