"""Optimizers' states and temporaries: the tables beside the real classes, run on small tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_births import SCALAR_BYTES, Measured, measured
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerofit.core.estimates import RunPhase
from zerofit.core.optimizers import memory as of
from zerofit.core.optimizers.memory import OptimizerMemory
from zerofit.core.optimizers.table import ENTRIES
from zerofit.core.strategy import OptimizerName, Strategy
from zerofit.planning.estimate.device_memory.optimizers import (
    STATES,
    TEMPORARIES,
    Optimizer,
    Stepped,
    optimizer_of,
)
from zerofit.planning.estimate.device_memory.replay import Tape, replay_live

_SHAPES = ((300, 70), (4096,), (40,), (64, 128), (100, 90))


def _parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in _SHAPES]


def _told(costs: OptimizerMemory, bytes_per_element: int) -> Measured:
    tensors = [
        Stepped(num_elements=torch.Size(shape).numel(), shape=shape, bytes_per_element=bytes_per_element)
        for shape in _SHAPES
    ]
    peaks = []
    tape = Tape()
    for is_first in (True, False):
        tape.begin(RunPhase.STEP if is_first else RunPhase.SAVE)
        Optimizer(costs=costs).step(tape, tensors, is_first=is_first)
    tape.sizes = [size if size > SCALAR_BYTES else 0 for size in tape.sizes]
    for peak in replay_live(tape).peaks:
        peaks.append(peak.live_bytes)
    states = sum(size for size, term in zip(tape.sizes, tape.terms, strict=True) if term == STATES)
    assert set(tape.terms) <= {STATES, TEMPORARIES}
    return Measured(states=states, peaks=(peaks[0], peaks[1]))


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
    of.FUSED_ADAMW, lambda parameters: torch.optim.AdamW(parameters, fused=True), id="fused"
)
_BY_OPERATORS = (
    pytest.param(
        of.FOREACH_ADAMW, lambda parameters: torch.optim.AdamW(parameters, foreach=True), id="foreach"
    ),
    pytest.param(of.ADAFACTOR, _adafactor, id="adafactor"),
    pytest.param(
        of.SGD,
        lambda parameters: torch.optim.SGD(parameters, weight_decay=0.1, foreach=False),
        id="sgd",
    ),
    pytest.param(
        of.DECAYED_SGD,
        lambda parameters: torch.optim.SGD(parameters, weight_decay=0.1, foreach=True),
        id="decayed sgd",
    ),
    pytest.param(
        of.MOMENTUM,
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True),
        id="undecayed momentum",
    ),
    pytest.param(
        of.ONE_STATE,
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9, weight_decay=0.1, foreach=True),
        id="momentum",
    ),
)
"""Steps made of torch's own operators; a fused one is a kernel."""
_FORMATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@_FORMATS
@pytest.mark.parametrize(("costs", "make"), [_FUSED, *_BY_OPERATORS])
def test_states_and_the_steps_largest_moment_are_those_of_the_real_class(
    costs: OptimizerMemory,
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    dtype: torch.dtype,
) -> None:
    assert _told(costs, dtype.itemsize) == measured(make, _parameters(dtype))


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
@pytest.mark.parametrize(("costs", "make"), _BY_OPERATORS)
def test_a_step_moves_the_bytes_of_the_real_operators(
    costs: OptimizerMemory, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    parameter = torch.nn.Parameter(torch.randn(512, 512).to(dtype))
    optimizer = make([parameter])
    for _ in range(2):  # the first one makes the states
        parameter.grad = torch.randn_like(parameter)
        with _Traffic() as traffic:
            optimizer.step()
    expected = costs.step_bytes if dtype is torch.float32 else costs.step_bytes_16bit
    assert traffic.num_bytes / parameter.numel() == pytest.approx(expected, rel=0.01)


_CLASSES = {
    entry.class_name: entry.memory
    for entry in ENTRIES
    if entry.library == "bitsandbytes" and entry.is_exact and entry.memory is not None
}
"""The classes of bitsandbytes whose memory the table has exactly."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("num_elements", "is_embedding"),
    [(4095, False), (4096, True), (4096, False), (4097, False), (99_999, False)],
)
@pytest.mark.parametrize(("name", "costs"), _CLASSES.items(), ids=_CLASSES)
def test_states_are_those_of_bitsandbytes(
    name: str, costs: OptimizerMemory, num_elements: int, is_embedding: bool, dtype: torch.dtype
) -> None:
    import bitsandbytes

    parameter = torch.nn.Parameter(torch.zeros(num_elements, dtype=dtype))
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()  # it knows parameters by their address, which may be used again
    if is_embedding:
        manager.override_config([parameter], "optim_bits", 32)
    optimizer = getattr(bitsandbytes.optim, name)([parameter])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pages are for GPUs
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    state = optimizer.state[parameter]
    real = [state[key].nbytes for key in _STATES if key in state]
    shared = [state[key].nbytes for key in ("qmap1", "qmap2") if key in state]
    tensor = Stepped(num_elements=num_elements, is_embedding=is_embedding, bytes_per_element=dtype.itemsize)
    told = Optimizer(costs=costs)
    assert list(told.states_of(tensor)) == real
    assert told.pages_of(tensor) == 0
    if not is_embedding and dtype is torch.float32:
        assert _born(told, [num_elements])[STATES] == real + shared


_STATES = ("state1", "state2", "absmax1", "absmax2")


@pytest.mark.parametrize("name", [name for name, memory in _CLASSES.items() if memory.is_paged])
@pytest.mark.parametrize("is_embedding", [True, False])
def test_pages_are_the_states_that_bitsandbytes_asks_to_be_paged(name: str, is_embedding: bool) -> None:
    """The very tensors that its buffers are made of, which on a GPU are pages from 1e5 elements on."""
    import bitsandbytes

    asked: list[int] = []

    class Watched(getattr(bitsandbytes.optim, name)):
        def get_state_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            asked.append(p.numel() * dtype.itemsize)
            return torch.zeros_like(p, dtype=dtype)

        def _get_state_double_buffer(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return self.get_state_buffer(torch.stack([p, p]), dtype)  # as large, and in pages as well

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
    told = Optimizer(costs=_CLASSES[name])
    tensor = Stepped(num_elements=100_000, is_embedding=is_embedding)
    assert told.pages_of(tensor) == sum(asked)
    assert list(told.states_of(tensor)) == scales
    tape = Tape()
    told.step(tape, [tensor, tensor], is_first=False)
    assert tape.sizes == [sum(asked)]  # one tensor's at a time


@pytest.mark.parametrize(
    ("optimizer", "states", "temporaries"),
    [
        (of.FOREACH_ADAMW, [4000, 4000, 40_000, 40_000], [4000, 40_000]),
        (of.FUSED_ADAMW, [4, 4000, 4000, 4, 40_000, 40_000], []),
        (of.ADAMW_8BIT, [4000, 4000, 10_000, 10_000, 160, 160, 1024, 1024], []),
        (of.PAGED_ADAMW, [4000, 4000, 40_000, 40_000], []),
        (of.PAGED_ADAMW_8BIT, [4000, 4000, 10_000, 10_000, 160, 160, 1024, 1024], []),
        (of.LION, [4000, 40_000], []),
        (of.LION_8BIT, [4000, 10_000, 160, 1024], []),
        (of.PAGED_LION_8BIT, [4000, 10_000, 160, 1024], []),
        (of.ADAFACTOR, [4000, 4, 40_000, 4], [4000] * 4 + [40_000] * 4),
        (of.SGD, [], [4000, 40_000]),
        (of.DECAYED_SGD, [], [4000, 40_000]),
        (of.MOMENTUM, [4000, 40_000], []),
        (of.ONE_STATE, [4000, 40_000], [4000, 40_000]),
    ],
)
def test_flat_tensors(optimizer: OptimizerMemory, states: list[int], temporaries: list[int]) -> None:
    """Adafactor makes four of a vector: its square, that and epsilon, the update, and its negative."""
    made = optimizer_of(Strategy(), own=optimizer)
    assert _born(made, [1000, 10_000]) == {STATES: states, TEMPORARIES: temporaries}


def test_a_strategys_optimizer_takes_the_place_of_the_scripts_own() -> None:
    strategy = Strategy(optimizer=OptimizerName.ADAMW_8BIT)
    assert optimizer_of(strategy, own=of.ONE_STATE) == Optimizer(costs=of.ADAMW_8BIT)


def test_an_unknown_optimizer_counts_as_torchs_foreach_adamw() -> None:
    assert optimizer_of(Strategy(), own=None) == Optimizer(costs=of.FOREACH_ADAMW)


def test_torchaos_offload_keeps_small_tensors_on_the_gpu_and_four_of_each_large_one_on_the_host() -> None:
    """Its class is for GPUs alone (torchao 0.18.0, optim/cpu_offload.py: minimal_size)."""
    offloading = Optimizer(costs=of.CPU_OFFLOAD)
    small, large = (Stepped(num_elements=size) for size in (4095, 4096))
    assert (sum(offloading.states_of(small)), offloading.host_bytes_of(small)) == (4 + 8 * 4095, 0)
    assert (offloading.states_of(large), offloading.host_bytes_of(large)) == ((), 16 * 4096)
