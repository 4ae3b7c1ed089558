"""What a rank records of itself, and what an update of the live file costs: several come in each step."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerators import quiet, settings, wrap_all
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from zerofit.core.rank_observation import Phase, PhasePeak, RankObservation, read_observation
from zerofit.training.reporting import guard, observe
from zerofit.training.reporting.observe import Observed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MOST_PYTHON_CALLS = 4
"""To move(), and to what checks the descriptor and writes. A call with cold caches takes some 20 us (measured
between two products of matrices)."""


def test_an_update_on_a_cpu_rank_makes_few_calls(tmp_path: Path) -> None:
    rank = Observed(tmp_path, 0, on_cpu=True)
    rank.move(Phase.FORWARD)  # reads the memory, at most once a second
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        rank.move(Phase.BACKWARD)
    finally:
        sys.setprofile(None)
    assert calls[0] == "move"
    assert len(calls) <= _MOST_PYTHON_CALLS, calls
    found = read_observation(tmp_path, 0)
    assert found is not None
    assert found.phase is Phase.BACKWARD


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Observed]:
    """This process as an observed rank."""
    observed = Observed(tmp_path, 0, on_cpu=True)
    monkeypatch.setattr(observe, "_observed", observed)
    yield observed
    faulthandler.unregister(observe._DUMP_SIGNAL)


def _found(folder: Path) -> RankObservation:
    found = read_observation(folder, 0)
    assert found is not None
    return found


def test_the_longest_phase_of_a_step_is_in_seconds(
    rank: Observed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1e9
    monkeypatch.setattr(observe, "time", SimpleNamespace(time=lambda: now))
    for phase, seconds in ((Phase.FORWARD, 500), (Phase.BACKWARD, 7), (Phase.SAVING, 30), (Phase.DATA, 90)):
        now += seconds
        rank.move(phase)
    assert _found(tmp_path).longest_phase_s == 30.0  # of the backward pass: loading and saving don't count


@pytest.mark.parametrize("is_held", [False, True])
def test_a_rank_that_ends_has_ended_also_inside_an_evaluation(
    rank: Observed, tmp_path: Path, *, is_held: bool
) -> None:
    rank.is_held = is_held
    observe.end()
    assert _found(tmp_path).phase is Phase.ENDED


def test_a_phase_has_its_peaks_of_allocated_and_of_reserved_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = {"allocated_bytes": {"all": {"peak": 70}}, "reserved_bytes": {"all": {"peak": 90}}}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: peaks)
    gpu_rank = Observed(tmp_path, 0)
    gpu_rank.phase = Phase.FORWARD
    gpu_rank.move(Phase.BACKWARD)
    gpu_rank.move(Phase.OPTIMIZER_STEP)  # which did not raise the peak
    assert _found(tmp_path).peaks == {Phase.FORWARD: PhasePeak(allocated_bytes=70, reserved_bytes=90)}


def _wait_in_a_thread(goes_on: threading.Event, is_there: threading.Event) -> None:
    is_there.set()
    goes_on.wait()


def test_the_stacks_are_those_of_all_threads(rank: Observed, tmp_path: Path) -> None:
    goes_on, is_there = threading.Event(), threading.Event()
    thread = threading.Thread(target=_wait_in_a_thread, args=(goes_on, is_there))
    thread.start()
    try:
        is_there.wait()
        os.kill(os.getpid(), observe._DUMP_SIGNAL)
    finally:
        goes_on.set()
        thread.join()
    stacks = (tmp_path / "rank0.stack").read_text()
    assert "in _wait_in_a_thread" in stacks
    assert "in test_the_stacks_are_those_of_all_threads" in stacks


@pytest.fixture
def backward(rank: Observed) -> Callable[[], None]:
    """A backward pass of torch.autograd under the hook."""
    module = SimpleNamespace(backward=lambda: None)
    observe.install_backward(module, settings(), quiet())
    return module.backward


@pytest.fixture
def loader_class(rank: Observed, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of its own with the hooks, which also wrap torch's iterator."""
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    kind = type("Loader", (DataLoader,), {})
    wrap_all(kind, observe.data_loader_wrappers(kind, settings(), quiet()))
    return kind


def _phase_after_the_end(batches: Any, rank: Observed) -> Phase:
    assert next(batches, None) is None
    return rank.phase


def test_the_last_batch_that_accelerate_fetched_early_is_in_its_forward_pass(
    rank: Observed, backward: Callable[[], None], loader_class: Any
) -> None:
    """accelerate asks for one batch more than it has returned, so that the end comes before the last step."""
    batches = iter(loader_class(range(2)))
    next(batches)
    next(batches)
    backward()
    assert _phase_after_the_end(batches, rank) is Phase.FORWARD


def test_a_loader_is_at_its_end_between_steps(
    rank: Observed, backward: Callable[[], None], loader_class: Any
) -> None:
    loaders = loader_class(range(2)), loader_class(range(2))
    trained, evaluated = map(iter, loaders)
    for _ in range(2):
        next(trained)
        assert rank.phase is Phase.FORWARD
        backward()
        backward()  # a second loss of the same batch
    assert _phase_after_the_end(trained, rank) is Phase.BETWEEN_STEPS
    for _ in range(2):
        next(evaluated)
        assert rank.phase is Phase.EVALUATING
    assert _phase_after_the_end(evaluated, rank) is Phase.BETWEEN_STEPS


def test_the_guard_records_each_new_number_of_collectives(
    rank: Observed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, recorded = iter((0, 3, 3, 8)), []

    def count() -> int:
        recorded.append(_found(tmp_path).collectives)
        return next(numbers)

    monkeypatch.setattr(guard, "_EVERY_S", 0)
    monkeypatch.setattr(guard, "count_collectives", count)
    with pytest.raises(StopIteration):
        guard._count()
    assert recorded == [0, 0, 3, 3, 8]
