"""How a rung's process ends, as the one that started it sees it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil

from zerofit.core.strategy import Lora, OptimizerName, Strategy
from zerofit.measuring.parent import Place, run_rung
from zerofit.measuring.results import Outcome, RungState
from zerofit.measuring.spec import Spec, spec_from_json, spec_to_json


def _spec(folder: Path) -> Spec:
    strategy = Strategy(
        micro_batch_size=4, gradient_accumulation_steps=2, optimizer=OptimizerName.SGD, lora=Lora(rank=4)
    )
    return Spec(
        model="all-minilm-l6-v2",
        task="sequence-classification",
        strategy=strategy,
        sequence_length=16,
        full_length=32,
        num_steps=1,
        on_cpu=True,
        result_file=str(Place(folder=folder, name="one").result),
    )


def test_a_spec_comes_back_from_its_json_as_it_was(tmp_path: Path) -> None:
    spec = _spec(tmp_path)
    assert spec_from_json(spec_to_json(spec)) == spec
    assert spec.batch_size == 8


def test_a_rung_over_its_time_is_ended(tmp_path: Path) -> None:
    others = psutil.Process().children()  # of tests that ran before in this process
    outcome = run_rung(_spec(tmp_path), Place(folder=tmp_path, name="one"), limit_s=0.2)
    assert outcome == Outcome(state=RungState.TOO_SLOW, reason="not done after 0.2 s, while importing")
    assert psutil.Process().children() == others


def test_a_rung_that_is_killed_says_by_what_and_when(tmp_path: Path) -> None:
    others = psutil.Process().children()  # of tests that ran before in this process

    def kill() -> None:
        while not (children := [one for one in psutil.Process().children() if one not in others]):
            time.sleep(0.01)
        children[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = run_rung(_spec(tmp_path), Place(folder=tmp_path, name="one"), limit_s=60)
    killer.join()
    assert outcome.state is RungState.KILLED
    assert outcome.reason.startswith("ended by SIGKILL, while importing")
