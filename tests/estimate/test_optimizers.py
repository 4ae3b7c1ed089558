"""Optimizers' states and temporaries: the tables beside the real classes, run on small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerofit.estimate.optimizers import (
    STATES,
    TEMPORARIES,
    OneState,
    Optimizer,
    Stepped,
    Stepper,
    make_optimizer,
)
from zerofit.estimate.replay import replay_live
from zerofit.estimate.tape import Tape
from zerofit.estimates import RunPhase
from zerofit.strategy import OptimizerName, Strategy

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


@contextmanager
def _births(known: list[torch.Tensor]) -> Iterator[_Births]:
    with _Births(known) as births:
        yield births


def _measure(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], dtype: torch.dtype) -> _Measured:
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in _SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(parameters)
    known = [*parameters, *(parameter.grad for parameter in parameters)]
    with _births(known) as first:
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if isinstance(value, torch.Tensor) and value.nbytes > _SCALAR_BYTES]
    total = sum(tensor.nbytes for tensor in tensors)
    with _births([*known, *tensors]) as second:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param(None, lambda parameters: torch.optim.AdamW(parameters, foreach=True), id="foreach"),
        pytest.param(
            OptimizerName.ADAMW, lambda parameters: torch.optim.AdamW(parameters, fused=True), id="fused"
        ),
        pytest.param(OptimizerName.ADAFACTOR, _adafactor, id="adafactor"),
        pytest.param(
            OptimizerName.SGD, lambda parameters: torch.optim.SGD(parameters, foreach=True), id="sgd"
        ),
        pytest.param(
            OneState.FULL,
            lambda parameters: torch.optim.SGD(parameters, momentum=0.9, weight_decay=0.1, foreach=True),
            id="momentum",
        ),
    ],
)
def test_states_and_the_steps_largest_moment_are_those_of_the_real_class(
    name: Stepper,
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    dtype: torch.dtype,
) -> None:
    assert _told(name, dtype.itemsize) == _measure(make, dtype)


@pytest.mark.parametrize(("num_elements", "bits"), [(4095, 32), (4096, 32), (4095, 8), (4096, 8), (4097, 8)])
def test_8_bit_states_are_those_of_bitsandbytes(num_elements: int, bits: int) -> None:
    from bitsandbytes.optim import AdamW8bit
    from bitsandbytes.optim.optimizer import GlobalOptimManager

    parameter = torch.nn.Parameter(torch.zeros(num_elements))
    GlobalOptimManager.get_instance().override_config([parameter], "optim_bits", bits)
    optimizer = AdamW8bit([parameter])
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    state = optimizer.state[parameter]
    real = [state[key].nbytes for key in ("state1", "state2", "absmax1", "absmax2") if key in state]
    shared = [state[key].nbytes for key in ("qmap1", "qmap2") if key in state]
    told = Optimizer(name=OptimizerName.ADAMW_8BIT)
    tensor = Stepped(num_elements=num_elements, is_embedding=bits == 32)
    assert list(told.states_of(tensor)) == real
    if bits == 8:
        assert _born(told, [num_elements])[STATES] == real + shared


@pytest.mark.parametrize("num_elements", [4095, 4096, 4097])
def test_one_8_bit_state_is_that_of_bitsandbytes(num_elements: int) -> None:
    from bitsandbytes.optim import Lion8bit

    parameter = torch.nn.Parameter(torch.zeros(num_elements))
    optimizer = Lion8bit([parameter])
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    state = optimizer.state[parameter]
    real = [state[key].nbytes for key in ("state1", "absmax1", "qmap1") if key in state]
    assert _born(Optimizer(name=OneState.EIGHT_BIT), [num_elements])[STATES] == real


@pytest.mark.parametrize(
    ("optimizer", "states", "temporaries"),
    [
        (None, [4000, 4000, 40_000, 40_000], [4000, 40_000]),
        (OptimizerName.ADAMW, [4, 4000, 4000, 4, 40_000, 40_000], []),
        (OptimizerName.ADAMW_8BIT, [4000, 4000, 10_000, 10_000, 160, 160, 1024, 1024], []),
        (OptimizerName.ADAFACTOR, [4000, 4, 40_000, 4], [4000] * 4 + [40_000] * 4),
        (OptimizerName.SGD, [], []),
        (OneState.FULL, [4000, 40_000], [4000, 40_000]),
        (OneState.EIGHT_BIT, [4000, 10_000, 160, 1024], []),
    ],
)
def test_flat_tensors(optimizer: Stepper, states: list[int], temporaries: list[int]) -> None:
    """Adafactor makes four of a vector: its square, that and epsilon, the update, and its negative."""
    made = make_optimizer(Strategy(), own=optimizer)
    assert _born(made, [1000, 10_000]) == {STATES: states, TEMPORARIES: temporaries}


def test_a_strategys_optimizer_takes_the_place_of_the_scripts_own() -> None:
    strategy = Strategy(optimizer=OptimizerName.ADAMW_8BIT)
    assert make_optimizer(strategy, own=OneState.FULL) == Optimizer(name=OptimizerName.ADAMW_8BIT)
