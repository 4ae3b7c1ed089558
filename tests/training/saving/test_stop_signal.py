"""When ranks ask each other whether one was told to stop: about once a second, at the same steps."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from accelerators import quiet, settings

from zerofit.training.saving import stop_signal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_ranks_ask_after_as_many_steps_as_a_second_takes(tmp_path: Path) -> None:
    stop = stop_signal._Stop(tmp_path)
    stop.asked_at = time.monotonic() - 0.1
    assert stop.agrees(1) is False
    assert stop.next_step == 2  # how long a step takes is not known yet
    stop.asked_at = time.monotonic() - 0.1
    assert stop.agrees(2) is False
    assert 3 <= stop.next_step <= 12  # a step in a tenth of a second, or longer on a busy machine
    asked = stop.next_step
    stop.receive()
    assert stop.agrees(asked - 1) is False
    assert stop.next_step == asked
    assert stop.agrees(asked) is True
    assert stop.is_agreed


def test_steps_that_take_no_time_on_a_coarse_clock_are_a_thousand_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signal, "time", SimpleNamespace(monotonic=lambda: 5.0))
    stop = stop_signal._Stop(tmp_path)
    for step in (1, 2):
        assert stop.agrees(step) is False
    assert stop.next_step == 1002


@pytest.mark.parametrize(
    ("step", "is_told", "has_trainer", "saves"),
    [(3, True, False, True), (3, False, False, False), (0, True, False, False), (3, True, True, False)],
)
def test_a_loop_saves_after_a_step_once_it_is_told_to_stop(
    step: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_told: bool,
    has_trainer: bool,
    saves: bool,
) -> None:
    class Loader:
        def __iter__(self) -> Iterator[int]:
            yield from range(4)

    stop = stop_signal._Stop(tmp_path)
    monkeypatch.setattr(stop_signal, "_stop", stop)
    monkeypatch.setattr(stop_signal.observe, "steps_done", lambda: step)
    stop_signal.install_in_loaders(
        SimpleNamespace(DataLoaderShard=Loader, DataLoaderDispatcher=type("Other", (Loader,), {})),  # type: ignore[arg-type]
        settings(),
        quiet(),
    )
    folders: list[str] = []
    project = SimpleNamespace(automatic_checkpoint_naming=False)
    stop.accelerator = SimpleNamespace(project_configuration=project, save_state=folders.append)
    stop.is_asked, stop.has_trainer = is_told, has_trainer
    batches = []
    with pytest.raises(SystemExit) if saves else contextlib.nullcontext():
        batches.extend(Loader())
    assert batches == ([0] if saves else [0, 1, 2, 3])
    assert folders == ([str(tmp_path / "checkpoints" / "step_3")] if saves else [])
    assert stop.saved_to == (folders[0] if saves else None)
