"""Regret: the plan's limit, what the grid holds, the ratio, and real runs of a small model under a limit."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_truth.builds import CpuAdamBuild
from gpu_truth.grid import FAR, SLOW, Entry, Grid, Question, make_grid, problem_of
from gpu_truth.regret import QUESTIONS_ON_CPU, Means, measure_question
from gpu_truth.results import RegretResult, Rule
from gpu_truth.usual import PLAIN, PRESET, TRAINER, usual_strategies
from gpu_truth.verdict import NUM_REPEATS, is_whole, kept, ratio, verdict
from kept_cases import SMALL, regret_of
from measuring.results import TrialOutcome, TrialState

from zerofit.core.facts import Machine, Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import (
    Buckets,
    Engine,
    OffloadDevice,
    OptimizerName,
    Precision,
    Strategy,
    ZeroStage,
)
from zerofit.core.units import GIB, MIB
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.machine.rates import catalog_rates
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import probe_versions
from zerofit.models.find import probe_model
from zerofit.planning.estimate.device_memory.non_torch_memory import non_torch_terms
from zerofit.planning.options import DEFAULT_RESERVE

VERSIONS = Versions(python="3.12.3", zerofit="0", torch="2.11.0", deepspeed="0.19.8", bitsandbytes="0.50.2")
HOST = Machine(
    gpus=(),
    num_cpu_cores=16,
    host_memory_bytes=256 * GIB,
    host_memory_available_bytes=240 * GIB,
    nvme_bytes=2**40,
)
H100 = replace(HOST, gpus=(find_gpu("H100"),))
NONE, CPU = OffloadDevice.NONE, OffloadDevice.CPU
TIGHT = 60 * MIB
"""Takes SMALL with checkpointing and micro-batches of 4, and not 32 samples at once."""
TOO_TIGHT = 140 * MIB
"""Of a GPU, where cuBLAS takes 64 MiB: far less than 256 samples of one layer need at once."""
LONG_S = 500.0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Question:
    file = tmp_path_factory.mktemp("small") / "config.json"
    file.write_text(json.dumps(SMALL), encoding="utf-8")
    return Question(
        key="small",
        model=str(file),
        task="sequence-classification",
        sequence_length=128,
        global_batch_size=32,
        limit_bytes=TIGHT,
    )


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that is not the user's."""
    return tmp_path_factory.mktemp("traces")


def _grid(question: Question, traces: Path) -> Grid:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(traces))
        return make_grid(question, machine=H100, versions=VERSIONS, rates=catalog_rates())


@pytest.mark.parametrize("machine", [H100, HOST])
@pytest.mark.parametrize("limit_bytes", [TIGHT, 6 * GIB])
def test_plan_leaves_to_torch_what_the_limit_leaves_it(
    small: Question, machine: Machine, limit_bytes: int
) -> None:
    question = replace(small, limit_bytes=limit_bytes)
    problem = problem_of(question, source=probe_model(small.model), machine=machine, versions=VERSIONS)
    outside = sum(term.num_bytes for term in non_torch_terms(problem.smallest_gpu, Topology(), VERSIONS))
    assert problem.card_bytes - outside == limit_bytes
    assert problem.device_bytes == problem.card_bytes - int(DEFAULT_RESERVE * problem.card_bytes)


@pytest.fixture(scope="module")
def shallow(small: Question, traces: Path) -> Question:
    """Return the question of a model of one layer, whose traces take half the time."""
    file = traces / "config.json"
    file.write_text(json.dumps({**SMALL, "num_hidden_layers": 1}), encoding="utf-8")
    return replace(small, model=str(file))


@pytest.fixture(scope="module")
def roomy(shallow: Question, traces: Path) -> Grid:
    """Return a grid under a limit that nothing comes near."""
    return _grid(replace(shallow, limit_bytes=6 * GIB, global_batch_size=4), traces)


@pytest.mark.slow
def test_grid_has_every_strategy_of_the_same_mathematics_once(roomy: Grid) -> None:
    assert roomy.choice is not None
    found = [roomy.choice, *(one.strategy for one in roomy.entries)]
    kinds = [
        (Engine.NATIVE, ZeroStage.NOTHING, NONE, NONE, optimizer, Buckets())
        for optimizer in (None, OptimizerName.ADAMW)
    ]
    kinds += [
        (Engine.DEEPSPEED, stage, CPU, param_offload, None, buckets)
        for stage, param_offload in (
            (ZeroStage.GRADIENTS, NONE),
            (ZeroStage.PARAMETERS, NONE),
            (ZeroStage.PARAMETERS, CPU),
        )
        for buckets in {one.buckets for one in found}
    ]
    expected = {
        Strategy(
            engine=engine,
            zero_stage=stage,
            optimizer_offload=optimizer_offload,
            param_offload=param_offload,
            optimizer=optimizer,
            buckets=buckets,
            precision=Precision.BF16,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=4 // micro_batch_size,
            gradient_checkpointing=checkpointing,
        )
        for engine, stage, optimizer_offload, param_offload, optimizer, buckets in kinds
        for micro_batch_size in (1, 2, 4)
        for checkpointing in (False, True)
    }
    assert len(found) == len(expected) == 2 * 6 + 3 * 2 * 6
    assert set(found) == expected


@pytest.mark.slow
def test_what_is_left_out_for_its_time_is_predicted_to_be_far_slower(roomy: Grid) -> None:
    assert roomy.choice is not None
    slow = [one.predicted_s or 0.0 for one in roomy.entries if "as long as the choice" in one.why]
    others = [one.predicted_s or 0.0 for one in roomy.entries if not one.why]
    assert slow
    assert min(slow) > max(others)
    assert min(slow) > SLOW * min(others) > 0


@pytest.mark.long
def test_the_fastest_that_is_left_out_of_each_kind_runs_as_a_check(roomy: Grid) -> None:
    by_kind: dict[tuple[Engine, OffloadDevice, OffloadDevice], list[Entry]] = {}
    for one in roomy.entries:
        if one.why:
            strategy = one.strategy
            kind = strategy.engine, strategy.optimizer_offload, strategy.param_offload
            by_kind.setdefault(kind, []).append(one)
    assert set(by_kind) == {
        (Engine.NATIVE, NONE, NONE),
        (Engine.DEEPSPEED, CPU, NONE),
        (Engine.DEEPSPEED, CPU, CPU),
    }
    for first, *others in by_kind.values():
        assert first.rule is None
        assert all(one.rule for one in others)


def test_a_tight_limit_leaves_out_what_needs_far_more(shallow: Question, traces: Path) -> None:
    question = replace(shallow, limit_bytes=TOO_TIGHT, global_batch_size=256)
    grid = _grid(question, traces)
    plain = usual_strategies(question)[PLAIN]
    (entry,) = (one for one in grid.entries if one.strategy == plain)
    assert entry.rule is Rule.FAR
    assert entry.why.startswith("predicted to need ")
    assert float(entry.why.split(", ")[1].split()[0]) >= FAR
    assert grid.choice is not None
    assert (grid.choice.micro_batch_size or 256) < 256


@pytest.fixture(scope="module")
def measured(small: Question, tmp_path_factory: pytest.TempPathFactory) -> RegretResult:
    """Return a question that was measured on the CPU, by a machine where CPU Adam can't be built."""
    plain = usual_strategies(small)[PLAIN]
    choice = replace(plain, micro_batch_size=4, gradient_accumulation_steps=8, gradient_checkpointing=True)
    slow = replace(plain, micro_batch_size=1, gradient_accumulation_steps=32)
    grid = Grid(
        choice=choice,
        entries=(
            Entry(strategy=plain, predicted_s=0.1),
            Entry(strategy=slow, predicted_s=9.0, rule=Rule.SLOW, why="slow"),
        ),
    )
    means = Means(
        folder=tmp_path_factory.mktemp("measured"),
        ends_at=time.monotonic() + LONG_S,
        lookahead=1,
        on_cpu=True,
        has_cpu_adam=False,
    )
    told: list[RegretResult] = []
    result = measure_question(small, grid, means, keep=told.append)
    assert [_num_ended(one) for one in told] == [1, 2, 3, 4]
    assert replace(told[-1], date=result.date) == result
    return result


def _num_ended(result: RegretResult) -> int:
    """Return how many different runs have ended: of the grid's, those that the rules keep."""
    found = {one.strategy: one.outcome.state for one in (*kept(result), *result.usual)}
    return sum(state is not TrialState.NOT_RUN for state in found.values())


@pytest.mark.evidence
def test_the_choice_runs_where_the_whole_batch_at_once_does_not(measured: RegretResult) -> None:
    assert measured.choice is not None
    assert measured.choice.outcome.measured is not None
    assert measured.choice.samples_per_s == 32 / measured.choice.outcome.measured.step_time_s
    plain, slow = measured.grid
    assert plain.outcome.state is TrialState.OUT_OF_MEMORY
    assert slow.outcome == TrialOutcome(state=TrialState.NOT_RUN, reason="slow")
    assert ratio(measured) == 1.0
    assert verdict(measured) == "1.00 (one run)"


@pytest.mark.evidence
def test_what_is_usual_stands_beside_it(measured: RegretResult) -> None:
    plain, preset, _ = measured.usual
    assert (plain.name, preset.name) == (PLAIN, PRESET)
    assert plain.outcome == measured.grid[0].outcome
    assert preset.outcome.state is TrialState.CANNOT_RUN
    assert preset.outcome.reason == "DeepSpeed's CPU Adam could not be built"


@pytest.mark.evidence
def test_trainer_finds_a_smaller_batch_and_says_so(measured: RegretResult) -> None:
    trainer = measured.usual[-1]
    assert trainer.name == TRAINER
    assert trainer.outcome.measured is not None, trainer.outcome.reason
    assert trainer.samples_per_s is not None
    batch_size = round(trainer.samples_per_s * trainer.outcome.measured.step_time_s)
    assert 0 < batch_size < 32
    assert trainer.note == f"global batch {batch_size} in place of 32"


def test_a_spent_budget_leaves_all_questions_over(small: Question, tmp_path: Path) -> None:
    kept: list[RegretResult] = []
    assert regret_of(tmp_path, small, limit_s=0, keep=kept.append) == ("small",)
    assert kept == []


@pytest.mark.slow
def test_a_question_that_cannot_be_planned_does_not_end_the_section(small: Question, tmp_path: Path) -> None:
    told: list[str] = []
    unknown = replace(small, model="no-such-model")
    assert regret_of(tmp_path, unknown, unplanned=told.append) == ("small",)
    (why,) = told
    assert why.startswith("small: ")


@pytest.mark.evidence
def test_a_whole_question_is_planned_and_measured_on_the_cpu(tmp_path: Path) -> None:
    kept: list[RegretResult] = []
    build = CpuAdamBuild(tmp_path / "build.log", on_cpu=True)
    build.wait(print)
    left_over = regret_of(
        tmp_path,
        QUESTIONS_ON_CPU[0],
        keep=kept.append,
        machine=replace(probe_machine(), gpus=()),
        versions=probe_versions(),
        has_cpu_adam=build.is_there(),
    )
    (result,) = kept
    assert left_over == ()
    assert result.choice is not None
    assert result.choice.outcome.state is TrialState.DONE
    assert ratio(result) is not None, verdict(result)
    assert len(result.choice.repeats_samples_per_s) == NUM_REPEATS
    assert is_whole(result)
    assert result.runs == 1
    ran = [one.strategy for one in result.grid if one.outcome.state is TrialState.DONE]
    assert {one.engine for one in ran if one is not None} == {Engine.NATIVE, Engine.DEEPSPEED}
