"""The cases of accuracy: enough of each kind, in order, and each one the tool's own rules allow."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from gpu_truth.cases import ACCURACY, ACCURACY_ON_CPU, CONFIGS, MODELS, case, cost_s, model_path
from gpu_truth.ladder import LADDER, LADDER_ON_CPU
from gpu_truth.predictions import Circumstances, predict
from gpu_truth.results import Case

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.core.facts import Machine
from zerofit.core.plan import Topology
from zerofit.core.strategy import OptimizerName, Precision
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.machine.rates import catalog_rates
from zerofit.machine.versions import probe_versions
from zerofit.models.find import probe_model
from zerofit.models.task import Task

LISTS = {"gpu": ACCURACY, "cpu": ACCURACY_ON_CPU}
HOST = Machine(gpus=(), num_cpu_cores=2, host_memory_bytes=2**34, host_memory_available_bytes=2**34)


def test_there_are_forty_for_a_gpu_and_twelve_for_the_cpu() -> None:
    assert len(ACCURACY) >= 40
    assert len(ACCURACY_ON_CPU) >= 12


@pytest.mark.parametrize("found", LISTS.values(), ids=LISTS)
def test_they_go_from_the_smallest_to_the_largest_and_each_key_is_there_once(found: tuple[Case, ...]) -> None:
    assert list(found) == sorted(found, key=cost_s)
    assert Counter(one.key for one in found).most_common(1)[0][1] == 1
    assert all("/" not in one.key for one in found)


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


def test_a_gpu_gets_fp16_with_and_without_autocast_and_bert_in_all_the_asked_sizes() -> None:
    formats = {(one.weights, one.strategy.precision) for one in ACCURACY}
    assert formats >= {(Precision.FP16, Precision.FP16), (Precision.FP32, Precision.FP16)}
    sizes = {(one.strategy.micro_batch_size, one.sequence_length) for one in ACCURACY if one.group == "bert"}
    assert sizes >= {(1, 128), (64, 512)}


@pytest.mark.parametrize("found", LISTS.values(), ids=LISTS)
def test_few_calibrate_and_every_group_has_others(found: tuple[Case, ...]) -> None:
    calibrating = [one for one in found if one.calibrates]
    assert 1 <= len(calibrating) <= len(found) // 8
    assert {one.group for one in found if not one.calibrates} == {one.group for one in found}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_parameters_that_its_order_goes_by(model: str) -> None:
    _, task, parameters = MODELS[model]
    facts = probe_model(model_path(model), task=Task(task)).facts
    assert facts.num_parameters == pytest.approx(parameters, rel=0.015)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_a_config_beside_the_cases_is_named_by_one(file: Path) -> None:
    assert file.stem in MODELS
    assert json.loads(file.read_text(encoding="utf-8"))["model_type"]


@pytest.mark.parametrize(
    "one", [*ACCURACY, *ACCURACY_ON_CPU, *LADDER, *LADDER_ON_CPU], ids=lambda one: one.key
)
def test_no_rule_of_the_tool_forbids_a_case(one: Case) -> None:
    situation = situation_of_strategy(
        one.strategy, topology=Topology(on_cpu=one not in ACCURACY), versions=probe_versions()
    )
    assert [str(found) for found in check(situation, rules=ALL_RULES).of(Severity.ERROR)] == []


def test_a_case_says_all_that_it_is_in_its_key() -> None:
    made = case(
        "llama-3.1-8b", (4, 2048), "bf16", "8bit", lora=64, checkpoint_every=2, windows=4, attention="eager"
    )
    assert made.key == "llama-3.1-8b-4x2048-bf16-8bit-eager-accumulate-4-checkpoint-2-lora-64"


@pytest.mark.parametrize("one", [ACCURACY_ON_CPU[0], ACCURACY_ON_CPU[-1]], ids=lambda one: one.key)
def test_a_small_case_can_be_predicted(one: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = predict(one, Circumstances(machine=HOST, versions=probe_versions(), rates=None))
    assert found.refused == ""
    assert found.predicted is not None
    assert found.predicted.parts.weights > 0


@pytest.mark.evidence
@pytest.mark.parametrize("one", ACCURACY, ids=lambda one: one.key)
def test_a_case_of_the_gpu_can_be_predicted_and_fits_80_gb(one: Case) -> None:
    gpu = find_gpu("H100-80G")
    machine = Machine(
        gpus=(gpu,), num_cpu_cores=16, host_memory_bytes=2**37, host_memory_available_bytes=2**37
    )
    circumstances = Circumstances(machine=machine, versions=probe_versions(), rates=catalog_rates())
    found = predict(one, circumstances)
    assert found.predicted is not None, found.refused
    assert found.predicted.device_bytes is not None
    assert found.predicted.device_bytes < gpu.usable_bytes
