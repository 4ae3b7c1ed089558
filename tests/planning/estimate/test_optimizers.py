"""Optimizers' states and temporaries: the tables beside the real classes, run on small tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerofit.core.estimates import RunPhase
from zerofit.core.strategy import OptimizerName, Strategy
from zerofit.planning.estimate.device_memory.optimizers import (
    COSTS,
    STATES,
    TEMPORARIES,
    Optimizer,
    ScriptOptimizer,
    Stepped,
    Stepper,
    optimizer_of,
)
from zerofit.planning.estimate.device_memory.replay import Tape, replay_live

_SHAPES = ((300, 70), (4096,), (40,), (64, 128), (100, 90))
_SCALAR_BYTES = 8
"""Scalars are not compared: torch makes many on the way, of 4 bytes each."""


class _Births(TorchDispatchMode):
    """Follows the storages that are made in its scope, and how many bytes of them are alive at most."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive = {key: alive for key, alive in self._alive.items() if not alive[0].expired()}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage.nbytes() > _SCALAR_BYTES:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))
        return result


@dataclass
class _Measured:
    states: int
    peaks: tuple[int, int]
    """The most that was alive in the first and the second step, over parameters and gradients."""


def _measure(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], dtype: torch.dtype) -> _Measured:
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in _SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(parameters)
    known = [*parameters, *(parameter.grad for parameter in parameters)]
    with _Births(known) as first:
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if isinstance(value, torch.Tensor) and value.nbytes > _SCALAR_BYTES]
    total = sum(tensor.nbytes for tensor in tensors)
    with _Births([*known, *tensors]) as second:
        optimizer.step()
    return _Measured(states=total, peaks=(first.peak, total + second.peak))


def _told(name: Stepper, bytes_per_element: int) -> _Measured:
    tensors = [
        Stepped(num_elements=torch.Size(shape).numel(), shape=shape, bytes_per_element=bytes_per_element)
        for shape in _SHAPES
    ]
    peaks = []
    tape = Tape()
    for is_first in (True, False):
        tape.begin(RunPhase.STEP if is_first else RunPhase.SAVE)
        Optimizer(name=name).step(tape, tensors, is_first=is_first)
    tape.sizes = [size if size > _SCALAR_BYTES else 0 for size in tape.sizes]
    for peak in replay_live(tape).peaks:
        peaks.append(peak.live_bytes)
    states = sum(size for size, term in zip(tape.sizes, tape.terms, strict=True) if term == STATES)
    assert set(tape.terms) <= {STATES, TEMPORARIES}
    return _Measured(states=states, peaks=(peaks[0], peaks[1]))


def _born(optimizer: Optimizer, sizes: list[int]) -> dict[str, list[int]]:
    """Return the sizes of what a first step over flat fp32 tensors of so many elements makes, by term."""
    tape = Tape()
    optimizer.step(tape, [Stepped(num_elements=size, shape=(size,)) for size in sizes], is_first=True)
    born = list(zip(tape.sizes, tape.terms, strict=True))
    return {term: [size for size, named in born if named == term] for term in (STATES, TEMPORARIES)}


def _adafactor(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)


_FUSED = pytest.param(
    OptimizerName.ADAMW, lambda parameters: torch.optim.AdamW(parameters, fused=True), id="fused"
)
_BY_OPERATORS = (
    pytest.param(None, lambda parameters: torch.optim.AdamW(parameters, foreach=True), id="foreach"),
    pytest.param(OptimizerName.ADAFACTOR, _adafactor, id="adafactor"),
    pytest.param(
        OptimizerName.SGD,
        lambda parameters: torch.optim.SGD(parameters, weight_decay=0.1, foreach=False),
        id="sgd",
    ),
    pytest.param(
        ScriptOptimizer.DECAYED_SGD,
        lambda parameters: torch.optim.SGD(parameters, weight_decay=0.1, foreach=True),
        id="decayed sgd",
    ),
    pytest.param(
        ScriptOptimizer.MOMENTUM,
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True),
        id="undecayed momentum",
    ),
    pytest.param(
        ScriptOptimizer.ONE_STATE,
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9, weight_decay=0.1, foreach=True),
        id="momentum",
    ),
)
"""Steps made of torch's own operators; a fused one is a kernel."""
_FORMATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@_FORMATS
@pytest.mark.parametrize(("name", "make"), [_FUSED, *_BY_OPERATORS])
def test_states_and_the_steps_largest_moment_are_those_of_the_real_class(
    name: Stepper,
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    dtype: torch.dtype,
) -> None:
    assert _told(name, dtype.itemsize) == _measure(make, dtype)


class _Traffic(TorchDispatchMode):
    """Adds the bytes that operators read and write, without those that only make a view."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and "empty" not in func.__name__:
            written = args[0] if result is None else result  # a foreach in place returns nothing
            leaves = tree_leaves((args, kwargs, written))
            self.num_bytes += sum(one.nbytes for one in leaves if isinstance(one, torch.Tensor))
        return result


@_FORMATS
@pytest.mark.parametrize(("name", "make"), _BY_OPERATORS)
def test_a_step_moves_the_bytes_of_the_real_operators(
    name: Stepper, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    parameter = torch.nn.Parameter(torch.randn(512, 512).to(dtype))
    optimizer = make([parameter])
    for _ in range(2):  # the first one makes the states
        parameter.grad = torch.randn_like(parameter)
        with _Traffic() as traffic:
            optimizer.step()
    costs = COSTS[name]
    expected = costs.step_bytes if dtype is torch.float32 else costs.step_bytes_16bit
    assert traffic.num_bytes / parameter.numel() == pytest.approx(expected, rel=0.01)


_CLASSES = {
    OptimizerName.PAGED_ADAMW: "PagedAdamW",
    OptimizerName.ADAMW_8BIT: "AdamW8bit",
    OptimizerName.PAGED_ADAMW_8BIT: "PagedAdamW8bit",
    OptimizerName.LION: "Lion",
    OptimizerName.LION_8BIT: "Lion8bit",
    OptimizerName.PAGED_LION_8BIT: "PagedLion8bit",
    ScriptOptimizer.ONE_STATE_8BIT: "RMSprop8bit",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("num_elements", "is_embedding"),
    [(4095, False), (4096, True), (4096, False), (4097, False), (99_999, False)],
)
@pytest.mark.parametrize("name", _CLASSES)
def test_states_are_those_of_bitsandbytes(
    name: Stepper, num_elements: int, is_embedding: bool, dtype: torch.dtype
) -> None:
    import bitsandbytes

    parameter = torch.nn.Parameter(torch.zeros(num_elements, dtype=dtype))
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()  # it knows parameters by their address, which may be used again
    if is_embedding:
        manager.override_config([parameter], "optim_bits", 32)
    optimizer = getattr(bitsandbytes.optim, _CLASSES[name])([parameter])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pages are for GPUs
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    state = optimizer.state[parameter]
    real = [state[key].nbytes for key in _STATES if key in state]
    shared = [state[key].nbytes for key in ("qmap1", "qmap2") if key in state]
    tensor = Stepped(num_elements=num_elements, is_embedding=is_embedding, bytes_per_element=dtype.itemsize)
    told = Optimizer(name=name)
    assert list(told.states_of(tensor)) == real
    assert told.pages_of(tensor) == 0
    if not is_embedding and dtype is torch.float32:
        assert _born(told, [num_elements])[STATES] == real + shared


_STATES = ("state1", "state2", "absmax1", "absmax2")


@pytest.mark.parametrize("name", [name for name, made in _CLASSES.items() if made.startswith("Paged")])
@pytest.mark.parametrize("is_embedding", [True, False])
def test_pages_are_the_states_that_bitsandbytes_asks_to_be_paged(name: Stepper, is_embedding: bool) -> None:
    """The very tensors that get_state_buffer() makes, which on a GPU are pages from 1e5 elements on."""
    import bitsandbytes

    asked: list[int] = []

    class Watched(getattr(bitsandbytes.optim, _CLASSES[name])):
        def get_state_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            asked.append(p.numel() * dtype.itemsize)
            return torch.zeros_like(p, dtype=dtype)

    parameter = torch.nn.Parameter(torch.zeros(100_000))
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    if is_embedding:
        manager.override_config([parameter], "optim_bits", 32)
    optimizer = Watched([parameter])
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    scales = [
        optimizer.state[parameter][key].nbytes for key in _STATES[2:] if key in optimizer.state[parameter]
    ]
    told = Optimizer(name=name)
    tensor = Stepped(num_elements=100_000, is_embedding=is_embedding)
    assert told.pages_of(tensor) == sum(asked)
    assert list(told.states_of(tensor)) == scales
    tape = Tape()
    told.step(tape, [tensor, tensor], is_first=False)
    assert tape.sizes == [sum(asked)]  # one tensor's at a time


@pytest.mark.parametrize(
    ("optimizer", "states", "temporaries"),
    [
        (None, [4000, 4000, 40_000, 40_000], [4000, 40_000]),
        (OptimizerName.ADAMW, [4, 4000, 4000, 4, 40_000, 40_000], []),
        (OptimizerName.ADAMW_8BIT, [4000, 4000, 10_000, 10_000, 160, 160, 1024, 1024], []),
        (OptimizerName.PAGED_ADAMW, [4000, 4000, 40_000, 40_000], []),
        (OptimizerName.PAGED_ADAMW_8BIT, [4000, 4000, 10_000, 10_000, 160, 160, 1024, 1024], []),
        (OptimizerName.LION, [4000, 40_000], []),
        (OptimizerName.LION_8BIT, [4000, 10_000, 160, 1024], []),
        (OptimizerName.PAGED_LION_8BIT, [4000, 10_000, 160, 1024], []),
        (OptimizerName.ADAFACTOR, [4000, 4, 40_000, 4], [4000] * 4 + [40_000] * 4),
        (OptimizerName.SGD, [], [4000, 40_000]),
        (ScriptOptimizer.DECAYED_SGD, [], [4000, 40_000]),
        (ScriptOptimizer.MOMENTUM, [4000, 40_000], []),
        (ScriptOptimizer.ONE_STATE, [4000, 40_000], [4000, 40_000]),
        (ScriptOptimizer.ONE_STATE_8BIT, [4000, 10_000, 160, 1024], []),
    ],
)
def test_flat_tensors(optimizer: Stepper, states: list[int], temporaries: list[int]) -> None:
    """Adafactor makes four of a vector: its square, that and epsilon, the update, and its negative."""
    made = optimizer_of(Strategy(), own=optimizer)
    assert _born(made, [1000, 10_000]) == {STATES: states, TEMPORARIES: temporaries}


def test_a_strategys_optimizer_takes_the_place_of_the_scripts_own() -> None:
    strategy = Strategy(optimizer=OptimizerName.ADAMW_8BIT)
    assert optimizer_of(strategy, own=ScriptOptimizer.ONE_STATE) == Optimizer(name=OptimizerName.ADAMW_8BIT)
