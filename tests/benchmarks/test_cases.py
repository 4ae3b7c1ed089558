"""The cases of accuracy and of many ranks: enough of each kind, and the tool's own rules allow each one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_truth.cases import ACCURACY, ACCURACY_ON_CPU, WANTED
from gpu_truth.ladder import LADDER, LADDER_ON_CPU
from gpu_truth.predictions import Circumstances, predict
from gpu_truth.rank_cases import RANKS, RANKS_ON_CPU
from gpu_truth.results import Case
from kept_cases import HOST

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, OffloadDevice, OptimizerName, Precision
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.machine.rates import catalog_rates
from zerofit.machine.versions import probe_versions

LISTS = {"gpu": ACCURACY, "cpu": ACCURACY_ON_CPU}


def test_there_are_forty_for_a_gpu_and_twelve_for_the_cpu() -> None:
    assert len(ACCURACY) >= 40
    assert len(ACCURACY_ON_CPU) >= 12


@pytest.mark.parametrize("found", LISTS.values(), ids=LISTS)
def test_every_family_format_optimizer_and_change_is_there(found: tuple[Case, ...]) -> None:
    strategies = [one.strategy for one in found]
    assert {one.group.split()[0] for one in found} == {"bert", "gpt2", "llama", "t5", "vit"}
    assert {one.optimizer for one in strategies} == {
        None,
        OptimizerName.ADAMW,
        OptimizerName.ADAMW_8BIT,
        OptimizerName.ADAFACTOR,
        OptimizerName.SGD,
    }
    assert {(one.weights, one.strategy.precision) for one in found} >= {
        (Precision.FP32, Precision.FP32),
        (Precision.BF16, Precision.BF16),
        (Precision.FP32, Precision.BF16),
    }
    assert any(one.gradient_checkpointing for one in strategies)
    assert any((one.gradient_accumulation_steps or 1) > 1 for one in strategies)
    assert any(one.lora for one in strategies)
    assert any(one.freeze for one in strategies)
    assert {one.attention for one in strategies} == {"eager", "sdpa"}


@pytest.mark.parametrize("cases", [RANKS, RANKS_ON_CPU])
def test_every_stage_and_number_of_ranks_is_covered_with_offload_and_without(cases: tuple[Case, ...]) -> None:
    assert len({one.key for one in cases}) == len(cases)
    under_zero = [one for one in cases if one.strategy.engine is Engine.DEEPSPEED]
    assert {one.num_ranks for one in under_zero} >= {2, 4, 8, 64}
    assert {one.strategy.zero_stage.value for one in under_zero} == {1, 2, 3}
    assert {one.strategy.optimizer_offload for one in under_zero} == {OffloadDevice.NONE, OffloadDevice.CPU}


@pytest.mark.parametrize("cases", [RANKS, RANKS_ON_CPU])
def test_fsdp2_is_measured_resharded_or_not_accumulating_and_with_a_packed_base(
    cases: tuple[Case, ...],
) -> None:
    under_fsdp2 = [one.strategy for one in cases if one.strategy.engine is Engine.FSDP2]
    assert {one.reshard_after_forward for one in under_fsdp2} == {True, False}
    assert any((one.gradient_accumulation_steps or 1) > 1 for one in under_fsdp2)
    packed = [one for one in under_fsdp2 if one.quantization is not None]
    assert packed
    assert all(one.quant_storage is one.precision for one in packed)


def test_what_is_wanted_most_comes_first() -> None:
    first = ACCURACY[: len(WANTED)]
    assert first == WANTED
    assert len({one.key for one in ACCURACY}) == len(ACCURACY)
    assert all(one.again for one in WANTED if one.strategy.freeze or "sgd" in one.key)
    assert [one.strategy.engine for one in RANKS[:8]] == [Engine.FSDP2] * 8


@pytest.mark.parametrize(
    ("stage", "offload", "numbers"),
    [
        (1, "", {2, 4, 8, 64}),
        (1, "offload-optimizer", {4}),
        (2, "", {2, 4, 8, 64}),
        (2, "offload-optimizer", {4, 8}),
        (3, "", {2, 8, 64}),
        (3, "offload-optimizer", {8}),
        (3, "offload-param", {4, 8, 64}),
    ],
)
def test_the_numbers_of_ranks_of_each_stage_and_offload(stage: int, offload: str, numbers: set[int]) -> None:
    group = f"zero-{stage} {offload}".strip()
    assert {one.num_ranks for one in RANKS if one.group == group} == numbers


def _forbidden(cases: Iterable[Case], topology_of: Callable[[Case], Topology]) -> list[str]:
    versions = probe_versions()
    return [
        f"{case.key}: {error}"
        for case in cases
        for error in check(
            situation_of_strategy(case.strategy, topology=topology_of(case), versions=versions),
            rules=ALL_RULES,
        ).of(Severity.ERROR)
    ]


def test_no_rule_of_the_tool_forbids_a_case() -> None:
    cases = (*ACCURACY, *ACCURACY_ON_CPU, *LADDER, *LADDER_ON_CPU)
    assert _forbidden(cases, lambda case: Topology(on_cpu=case not in ACCURACY)) == []


def test_no_rule_forbids_a_case_of_many_ranks() -> None:
    cases = (*RANKS, *RANKS_ON_CPU)
    assert _forbidden(cases, lambda case: Topology(world_size=case.num_ranks)) == []


@pytest.mark.slow
def test_a_small_case_can_be_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    circumstances = Circumstances(machine=HOST, versions=probe_versions(), rates=None)
    found = predict(ACCURACY_ON_CPU[0], circumstances)
    assert found.refused == ""
    assert found.predicted is not None
    assert found.predicted.parts.weights > 0


@pytest.mark.evidence
@pytest.mark.parametrize("one", ACCURACY, ids=lambda one: one.key)
def test_a_case_of_the_gpu_can_be_predicted_and_fits_80_gb(one: Case) -> None:
    gpu = find_gpu("H100-80G")
    machine = replace(HOST, gpus=(gpu,), host_memory_bytes=2**37, host_memory_available_bytes=2**37)
    circumstances = Circumstances(machine=machine, versions=probe_versions(), rates=catalog_rates())
    found = predict(one, circumstances)
    assert found.predicted is not None, found.refused
    assert found.predicted.device_bytes is not None
    assert found.predicted.device_bytes < gpu.usable_bytes
