"""A ladder of fixed figures as table, JSON, commands and picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planning_problems import VERSIONS, machine

from zerofit.cli.output.ladder_plot import draw_ladder, ladder_figure
from zerofit.cli.output.ladder_table import ladder_commands, ladder_json, ladder_table
from zerofit.configs.write.command import Rendezvous
from zerofit.core.errors import UserError
from zerofit.core.estimates import (
    Estimate,
    Holder,
    MemoryEstimate,
    PhaseMemory,
    RunPhase,
    StepTime,
    Term,
    TimeTerm,
)
from zerofit.core.plan import Plan, Topology
from zerofit.core.units import GIB
from zerofit.launching.ladder import Ladder, LadderRung
from zerofit.launching.rungs import LadderStep, baseline, climb, parse_rungs
from zerofit.launching.start import PlannedLaunch
from zerofit.launching.trials import TrialEnd, TrialResult, Trials, Tried
from zerofit.models.find import probe_model

_RENDEZVOUS = Rendezvous(machine_rank=0, main_process_ip="127.0.0.1", main_process_port=29500)
_ENDS = {
    "baseline": TrialResult(end=TrialEnd.MEASURED, step_time_s=0.5, gpu_bytes=20 * GIB, host_bytes=3 * GIB),
    "tf32": TrialResult(end=TrialEnd.FAILED, cause="rank 0 exited with 1: ValueError"),
    "zero-2": TrialResult(end=TrialEnd.OUT_OF_MEMORY, cause="rank 1 ran out of GPU memory"),
}


def _estimate(gib: int) -> Estimate:
    term = Term(name="all", num_bytes=gib * GIB, holder=Holder.TENSORS, formula="", source="")
    memory = MemoryEstimate(
        phases=(PhaseMemory(phase=RunPhase.STEP, terms=(term,)),), uncertainty=0.1, uncertainty_source=""
    )
    time = TimeTerm(name="all", seconds=0.4, formula="", source="")
    step_time = StepTime(terms=(time,), uncertainty=0.3, uncertainty_source="")
    return Estimate(device=memory, host=memory, step_time=step_time, tokens_per_step=1)


def _ladder(*, on_cpu: bool = False, predicts: bool = True) -> Ladder:
    """Return a ladder of two ranks whose last rung was not run."""
    rungs = parse_rungs("baseline,tf32,zero-2,zero-3")
    rung_of = {}
    for step in climb(rungs, baseline(batch_size=4, sequence_length=128), is_cumulative=True):
        plan = Plan(
            strategy=step.run.strategy,
            topology=Topology(world_size=2, on_cpu=on_cpu),
            machine=machine(2),
            versions=VERSIONS,
            estimate=_estimate(19 if step.rung.name == "baseline" else 30) if predicts else None,
        )
        launch = PlannedLaunch(plan=plan, target=("-m", "script"), rendezvous=_RENDEZVOUS)
        rung_of[step.rung.name] = _rung(step, launch, on_cpu=on_cpu)
    found = tuple(rung_of.values())
    tried = (Tried(launch=one.launch, result=one.result, is_kept=False) for one in found if one.result)
    return Ladder(
        model=probe_model("all-minilm-l6-v2").facts,
        batch_size=4,
        sequence_length=128,
        is_cumulative=True,
        predicted_for=machine(2) if predicts else None,
        rungs=found,
        trials=Trials(tried=tuple(tried), folder=Path("zerofit-runs/ladder-x-0")),
    )


def _rung(step: LadderStep, launch: PlannedLaunch, *, on_cpu: bool) -> LadderRung:
    result = _ENDS.get(step.rung.name)
    return LadderRung(
        step=step,
        launch=launch,
        command=f"zerofit launch {step.rung.name}",
        result=replace(result, gpu_bytes=None) if result and on_cpu else result,
        shortage="needs 30.0 GiB of 22.8 GiB on each GPU" if step.rung.name == "zero-2" else "",
    )


def test_the_table_has_measured_beside_predicted_and_why_rungs_have_nothing_measured() -> None:
    assert ladder_table(_ladder(), width=None) == (
        "all-minilm-l6-v2 (BertForSequenceClassification, 22.7 M parameters), 4 samples a step on each of 2 "
        "ranks, length 128\n"
        "on 2 x NVIDIA A100-SXM4-80GB, torch 2.13.0; each rung on top of those above\n"
        "\n"
        "rung      batch        GPU       predicted  host     step    predicted  samples/s\n"
        "baseline  4 x 1 x 128  20.0 GiB  19.0 GiB   3.0 GiB  500 ms  400 ms     16\n"
        "+ tf32    4 x 1 x 128  -         30.0 GiB   -        -       400 ms     -          failed\n"
        "+ ZeRO-2  4 x 1 x 128  -         30.0 GiB   -        -       400 ms     -          out of memory\n"
        "+ ZeRO-3  4 x 1 x 128  -         30.0 GiB   -        -       400 ms     -          not run\n"
        "\n"
        "+ tf32: rank 0 exited with 1: ValueError; the rungs below leave it out\n"
        "+ ZeRO-2: rank 1 ran out of GPU memory\n"
        "+ ZeRO-2: predicted not to fit, as it needs 30.0 GiB of 22.8 GiB on each GPU\n"
        "GPU: the most that PyTorch's allocator reserved on any rank\n"
        "batch: micro-batch x accumulation x length; host: the most resident memory of any rank"
    )
    assert max(map(len, ladder_table(_ladder(), width=80).splitlines())) <= 80


def test_on_the_cpu_there_is_no_gpu_memory_and_without_gpus_no_prediction() -> None:
    alone = ladder_table(_ladder(on_cpu=True, predicts=False), width=None).splitlines()
    assert alone[3:5] == [
        "rung      batch        host     step    samples/s",
        "baseline  4 x 1 x 128  3.0 GiB  500 ms  16",
    ]
    assert alone[1].startswith("on 2 CPU ranks, ")
    rehearsed = ladder_table(_ladder(on_cpu=True), width=None).splitlines()
    assert rehearsed[-1] == "measured on CPU ranks; predicted for 2 x NVIDIA A100-SXM4-80GB"


def test_the_json_has_each_rung_with_its_command_result_and_prediction() -> None:
    document = json.loads(ladder_json(_ladder()))
    first, *_, last = document["rungs"]
    assert first["command"] == "zerofit launch baseline"
    assert (first["result"]["gpu_bytes"], first["predicted_bytes"]) == (20 * GIB, 19 * GIB)
    assert (first["samples_per_s"], first["predicted_step_time_s"]) == (16.0, 0.4)
    assert (last["result"], last["samples_per_s"]) == (None, None)
    assert (document["num_ranks"], document["on_cpu"], document["stopped_by"]) == (2, False, None)


def test_the_commands_are_for_a_shell_and_say_which_rung_is_refused() -> None:
    ladder = _ladder()
    ladder = replace(ladder, rungs=tuple(replace(one, result=None) for one in ladder.rungs[:1]))
    assert ladder_commands(ladder).splitlines()[2:] == ["# baseline", "zerofit launch baseline"]
    assert "# not run: rank 0 exited with 1: ValueError" in ladder_commands(_ladder()).splitlines()


def test_a_picture_has_the_figures_of_the_ladder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    memory, time = ladder_figure(_ladder()).axes
    assert [bar.get_width() for bar in memory.containers[0]] == [20, 0, 0, 0]
    assert [bar.get_width() for bar in time.containers[0]] == [0.5, 0, 0, 0]
    assert [*memory.collections[0].get_offsets()[:, 0]] == [19, 30, 30, 30]
    notes = [text.get_text() for text in memory.texts if text.get_style() == "italic"]
    assert notes == [" ", " failed", " out of memory", " not run"]
    draw_ladder(_ladder(), tmp_path / "none" / "ladder.png")
    assert (tmp_path / "none" / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_in_a_folder_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "none").write_text("")
    path = tmp_path / "none" / "ladder.png"
    with pytest.raises(UserError) as raised:
        draw_ladder(_ladder(), path)
    assert str(raised.value) == (
        "error[not-writable]: a file can't be written\n"
        f"  found: File exists: {path}\n"
        "  why:   the folder or file is not writable\n"
        "  fix:   name a writable folder: --plot FILE"
    )
