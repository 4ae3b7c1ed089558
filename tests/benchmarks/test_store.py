"""The store: which older results stand, and which file is gone on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gpu_truth.cases import case
from gpu_truth.results import MachineRecord, Section
from gpu_truth.store import open_store
from kept_cases import CPU, result_of

from zerofit.core.facts import Versions
from zerofit.measuring.results import TrialOutcome, TrialState

VERSIONS = Versions(python="3.12.0", zerofit="0.1.0", torch="2.11.0")
RESULT = result_of(
    case("gpt2", (8, 512), "bf16"), TrialOutcome(state=TrialState.OUT_OF_MEMORY, reason="it was full")
)


def test_a_case_that_has_changed_under_its_key_is_not_done(tmp_path: Path) -> None:
    store = open_store(tmp_path / "cpu.json", CPU, VERSIONS)
    store.keep_case(Section.RANKS, RESULT)
    again = open_store(tmp_path / "cpu.json", CPU, VERSIONS)
    assert again.done(Section.RANKS) == {RESULT.case}
    assert replace(RESULT.case, num_steps=RESULT.case.num_steps + 1) not in again.done(Section.RANKS)


@pytest.mark.parametrize(
    ("machine", "versions", "what"),
    [
        (CPU, replace(VERSIONS, torch="2.12.0"), "other versions"),
        (replace(CPU, driver="590.1"), VERSIONS, "another machine"),
        (replace(CPU, num_cpu_cores=16), VERSIONS, "another machine"),
    ],
)
def test_another_machine_or_other_versions_set_the_older_file_aside(
    tmp_path: Path,
    machine: MachineRecord,
    versions: Versions,
    what: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "cpu.json"
    open_store(path, CPU, VERSIONS).keep_case(Section.ACCURACY, RESULT)
    before = path.read_text(encoding="utf-8")
    assert open_store(path, machine, versions, sets_aside=False).results.accuracy == ()
    assert path.read_text(encoding="utf-8") == before
    assert open_store(path, machine, versions).results.accuracy == ()
    assert (tmp_path / "cpu.before.json").read_text(encoding="utf-8") == before
    assert capsys.readouterr().err == (
        f"measure_gpu: cpu.json is of {what}; it is set aside as cpu.before.json\n"
    )
