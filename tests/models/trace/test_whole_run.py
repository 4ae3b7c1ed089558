"""A whole run with a real optimizer against the tape that NativeEngine plays from one micro-batch's log."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from tiny_traces import tiny

from zerofit.core.allocation_log import Event, TensorKind, TraceRequest
from zerofit.core.estimates import RunPhase
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import OptimizerName, Strategy
from zerofit.models.trace.affine import exact, to_allocation_log
from zerofit.models.trace.entry import describe
from zerofit.models.trace.prepare import as_if_eager, prepare_model
from zerofit.models.trace.recorder import Recorder, watching
from zerofit.models.trace.run import forward_and_backward, hooked, run_micro_batch
from zerofit.planning.estimate.device_memory.memory import play_strategy
from zerofit.planning.estimate.engines.engine import NUM_STEPS, Setup

_REQUEST = TraceRequest(sequence_length=16, is_padded=False, keeps_outputs=False)
_SAMPLES = 3
_SCALARS = 16
"""Bytes up to which a storage is left out: step counters and the like."""

Changes = list[list[int]]
"""Births as they come; and by turns with them what dies before the next birth, sorted."""


def _changes(sizes: list[int]) -> Changes:
    changes: Changes = []
    for is_birth, group in groupby((size for size in sizes if abs(size) > _SCALARS), lambda size: size > 0):
        run = list(group)
        changes.append(run if is_birth else sorted(run))
    return changes


def _recorded(model: Any, optimizer: Any, accumulation: int) -> Changes:
    """Return what a run of two steps allocates and frees, the optimizer's own tensors included."""
    recorder = Recorder(is_padded=False, as_on_cuda=False)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.ignore(tensor)
    with hooked(model, describe(model), recorder), as_if_eager((8, 0)), watching(recorder):
        for _ in range(NUM_STEPS):
            for _ in range(accumulation):
                forward_and_backward(model, _SAMPLES, _REQUEST, recorder)
                recorder.phase = TensorKind.INPUT
            optimizer.step()
            optimizer.zero_grad()
        recorder.close()
    log = recorder.log
    return _changes(
        [
            log.num_bytes[argument] * (1 if code == Event.ALLOCATE else -1)
            for code, argument in zip(log.codes, log.arguments, strict=True)
            if code in (Event.ALLOCATE, Event.FREE)
        ]
    )


def _played(model: Any, name: OptimizerName | None, accumulation: int) -> Changes:
    """Return what the native engine makes of the log of one micro-batch."""
    skeleton = describe(model)
    raw = run_micro_batch(model, skeleton, _SAMPLES, _REQUEST, as_on_cuda=False)
    strategy = Strategy(
        micro_batch_size=_SAMPLES,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0,
        optimizer=name,
    )
    setup = Setup(
        log=to_allocation_log(exact(raw), skeleton, _SAMPLES),
        strategy=strategy,
        topology=Topology(world_size=1),
        versions=Versions(python="3", zerofit="0", torch="2.13.0"),
    )
    tape = play_strategy(setup).tape
    begins = next(place for place, phase in tape.marks if phase is RunPhase.FORWARD)
    ends = next((place for place, phase in tape.marks if phase is RunPhase.SAVE), len(tape.entries))
    return _changes(
        [
            tape.sizes[entry - 1] if entry > 0 else -tape.sizes[-entry - 1]
            for entry in tape.entries[begins:ends]
            if tape.terms[abs(entry) - 1] != "kernel workspaces"  # cuBLAS's, which a CPU has none of
        ]
    )


_REST = [
    (family, name, accumulation)
    for family in ("bert", "llama")
    for name in (None, OptimizerName.ADAMW, OptimizerName.SGD)
    for accumulation in (1, 2)
]


@pytest.mark.parametrize(
    ("family", "name", "accumulation"),
    [("llama", None, 2), *(pytest.param(*case, marks=pytest.mark.evidence) for case in _REST)],
)
def test_the_tape_of_two_steps_is_what_a_whole_run_allocates(
    family: str, name: OptimizerName | None, accumulation: int
) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    config, build = tiny(family, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = prepare_model(build, config, _REQUEST)
        make: Any = {
            None: lambda parameters: torch.optim.AdamW(parameters, foreach=True),
            OptimizerName.ADAMW: lambda parameters: torch.optim.AdamW(parameters, fused=True),
            OptimizerName.SGD: lambda parameters: torch.optim.SGD(
                parameters, foreach=False, weight_decay=0.1
            ),
        }
        recorded = _recorded(model, make[name](model.parameters()), accumulation)
        played = _played(model, name, accumulation)
    assert len(recorded) > 250
    assert played == recorded
