"""Candidates that are considered, fixed, and forbidden by a compatibility rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from planning_problems import problem, spec_of

from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec
from zerofit.core.freezing import FROZEN_LAYERS
from zerofit.core.overrides import FLAGS
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    StateDictType,
    Strategy,
    ZeroStage,
)
from zerofit.planning.candidates import DEFAULT_NVME_PATH, SMALL_BUCKETS, candidates, divisors
from zerofit.planning.options import Allow
from zerofit.planning.plan_labels import label
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.search import placement_of, simplicity, tier
from zerofit.scripts.source.read_script import read_script

_CPU, _NVME = OffloadDevice.CPU, OffloadDevice.NVME


def _kinds(strategies: Iterable[Strategy]) -> set[tuple[str, int, str, str]]:
    return {
        (engine.value, stage.value, optimizer.value, param.value)
        for engine, stage, optimizer, param in map(placement_of, strategies)
    }


_OFFLOAD = {
    ("deepspeed", 2, "cpu", "none"),
    ("deepspeed", 3, "cpu", "none"),
    ("deepspeed", 3, "cpu", "cpu"),
}
_ZERO = {("deepspeed", stage, "none", "none") for stage in (1, 2, 3)}
_NATIVE = {("native", 0, "none", "none")}


@pytest.mark.parametrize(
    ("num_gpus", "spec", "expected"),
    [
        pytest.param(8, spec_of(), _NATIVE | _ZERO | _OFFLOAD, id="several GPUs: everything"),
        pytest.param(1, spec_of(), _NATIVE | _OFFLOAD, id="one GPU has nothing to share"),
        pytest.param(
            1,
            spec_of(zero_stage=ZeroStage.GRADIENTS),
            {("deepspeed", 2, "none", "none"), ("deepspeed", 2, "cpu", "none")},
            id="unless a stage is fixed",
        ),
        pytest.param(8, spec_of(engine=Engine.NATIVE), _NATIVE, id="engine fixed"),
        pytest.param(
            8,
            spec_of(zero_stage=ZeroStage.PARAMETERS, param_offload=OffloadDevice.NONE),
            {("deepspeed", 3, "none", "none"), ("deepspeed", 3, "cpu", "none")},
            id="stage and offload fixed",
        ),
        pytest.param(
            8,
            spec_of(zero_stage=ZeroStage.OPTIMIZER_STATES, optimizer_offload=_CPU),
            {("deepspeed", 1, "cpu", "none")},
            id="what would not be considered by itself",
        ),
        pytest.param(
            8,
            spec_of(optimizer_offload=_NVME, nvme_path="/disk"),
            {("deepspeed", 3, "nvme", param) for param in ("none", "cpu", "nvme")},
            id="NVMe fixed",
        ),
    ],
)
def test_kinds(num_gpus: int, spec: RunSpec, expected: set[Any]) -> None:
    assert _kinds(candidates(problem(num_gpus=num_gpus, spec=spec)).strategies) == expected


def test_a_machine_with_nvme_may_offload_to_it() -> None:
    found = candidates(problem(machine_fields={"nvme_bytes": 10**12})).strategies
    paths = {one.nvme_path for one in found if one.uses_nvme}
    assert (paths, any(one.nvme_path for one in found if not one.uses_nvme)) == ({DEFAULT_NVME_PATH}, False)


@pytest.mark.parametrize(
    ("num_gpus", "spec", "expected"),
    [
        (8, spec_of(), {(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)}),
        (8, spec_of(micro_batch_size=3), {(3, 4)}),
        (8, spec_of(gradient_accumulation_steps=2), {(6, 2)}),
        (1, spec_of(micro_batch_size=32), {(32, 3)}),
    ],
)
def test_every_divisor_is_a_micro_batch(num_gpus: int, spec: RunSpec, expected: set[tuple[int, int]]) -> None:
    found = candidates(problem(num_gpus=num_gpus, global_batch_size=96, spec=spec)).strategies
    assert {(one.micro_batch_size, one.gradient_accumulation_steps) for one in found} == expected


def test_every_candidate_makes_the_global_batch() -> None:
    for num_gpus in (1, 2, 3, 6):
        for one in candidates(problem(num_gpus=num_gpus, global_batch_size=36)).strategies:
            assert (one.micro_batch_size or 0) * (one.gradient_accumulation_steps or 0) * num_gpus == 36


def test_a_micro_batch_that_does_not_make_the_global_batch_is_refused() -> None:
    with pytest.raises(UserError, match="global batch can't be made"):
        candidates(problem(global_batch_size=64, spec=spec_of(micro_batch_size=3)))


_FIXED: dict[str, Any] = {
    "engine": Engine.DEEPSPEED,
    "zero_stage": ZeroStage.PARAMETERS,
    "optimizer_offload": _CPU,
    "param_offload": _CPU,
    "precision": Precision.FP32,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "gradient_checkpointing": False,
    "optimizer": OptimizerName.ADAMW,
    "attention": "eager",
    "compile": True,
    "checkpoint_every": 2,
    "activation_offload": True,
    "freeze": ("embeddings", "*.layers.0.*"),
    "lora": Lora(rank=4, alpha=8),
    "quantization": Quantization.NF4,
    "tf32": True,
    "liger": True,
    "group_by_length": True,
    "reshard_after_forward": False,
    "state_dict_type": StateDictType.FULL,
}
_BESIDE: dict[str, dict[str, Any]] = {
    "reshard_after_forward": {"engine": Engine.FSDP2},
    "state_dict_type": {"engine": Engine.FSDP2},
    "quantization": {"lora": Lora()},
    "checkpoint_every": {"gradient_checkpointing": True},
}
"""Fields that a flag needs beside it."""


@pytest.mark.parametrize("field", _FIXED)
def test_what_the_user_fixed_holds_in_every_candidate(field: str) -> None:
    found = candidates(problem(spec=spec_of(**{field: _FIXED[field]}, **_BESIDE.get(field, {})))).strategies
    assert {getattr(one, field) for one in found} == {_FIXED[field]}


def test_activations_are_offloaded_only_where_asked_and_only_with_checkpointing() -> None:
    usual, more = (candidates(problem(), offloads_activations=wanted).strategies for wanted in (False, True))
    moved = [one for one in more if one.activation_offload]
    assert [one for one in more if not one.activation_offload] == [*usual]
    assert [replace(one, activation_offload=False) for one in moved] == [
        one for one in usual if one.gradient_checkpointing
    ]
    plain = problem(spec=spec_of(gradient_checkpointing=False))
    assert candidates(plain, offloads_activations=True) == candidates(plain)


def test_every_flag_of_a_strategy_can_be_fixed() -> None:
    assert {*_FIXED, "nvme_path"} == set(FLAGS)


@pytest.mark.parametrize(
    ("allow", "expected"),
    [
        (frozenset(), {0, 1, 2}),
        ({Allow.ADAFACTOR}, {0, 1, 2, 3}),
        ({Allow.FREEZE}, {0, 1, 2, 4, 5}),
        ({Allow.LORA}, {0, 1, 2, 6}),
        ({Allow.QLORA}, {0, 1, 2, 7}),
    ],
)
def test_only_what_is_allowed_changes_the_training(allow: set[Allow], expected: set[int]) -> None:
    found = candidates(problem(allow=frozenset(allow))).strategies
    assert {int(tier(one)) for one in found} == expected


def test_a_rule_drops_what_it_forbids_and_is_named() -> None:
    asked = problem(spec=spec_of(zero_stage=ZeroStage.GRADIENTS, param_offload=_CPU))
    found = candidates(asked)
    rules = {finding.rule for dropped in found.dropped for finding in dropped.findings}
    assert (found.strategies, rules) == ((), {"param-offload-needs-zero3"})


def test_old_gpus_get_fp16() -> None:
    old = GpuSpec(name="Tesla V100-SXM2-32GB", memory_bytes=32 * 2**30, compute_capability=(7, 0))
    found = candidates(_with_gpu(old)).strategies
    assert {one.precision for one in found} == {Precision.FP16}


def _with_gpu(gpu: GpuSpec) -> Any:
    asked = problem()
    return replace(asked, machine=replace(asked.machine, gpus=(gpu,) * 8))


@pytest.mark.parametrize(
    ("number", "expected"), [(1, (1,)), (12, (1, 2, 3, 4, 6, 12)), (49, (1, 7, 49)), (13, (1, 13))]
)
def test_divisors(number: int, expected: tuple[int, ...]) -> None:
    assert divisors(number) == expected


_ZERO2 = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS, micro_batch_size=2)
_FROM_SIMPLE = (
    Strategy(micro_batch_size=4),
    Strategy(micro_batch_size=2),
    Strategy(micro_batch_size=4, optimizer=OptimizerName.ADAMW),
    Strategy(micro_batch_size=8, gradient_checkpointing=True),
    replace(_ZERO2, zero_stage=ZeroStage.OPTIMIZER_STATES, gradient_checkpointing=True),
    _ZERO2,
    replace(_ZERO2, buckets=SMALL_BUCKETS),
    replace(_ZERO2, zero_stage=ZeroStage.PARAMETERS),
    replace(_ZERO2, optimizer_offload=_CPU),
    replace(_ZERO2, zero_stage=ZeroStage.PARAMETERS, optimizer_offload=_CPU, param_offload=_CPU),
)


def test_from_the_simplest_strategy_on() -> None:
    places = [simplicity(strategy) for strategy in _FROM_SIMPLE]
    assert places == sorted(places)
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (_ZERO2, 0),
        (Strategy(optimizer=OptimizerName.ADAMW), 0),
        (replace(_ZERO2, optimizer_offload=_CPU), 1),
        (Strategy(optimizer=OptimizerName.ADAMW_8BIT), 2),
        (Strategy(optimizer=OptimizerName.ADAFACTOR), 3),
        (Strategy(freeze=("*",)), 4),
        (Strategy(freeze=FROZEN_LAYERS), 5),
        (Strategy(lora=Lora()), 6),
        (replace(_ZERO2, lora=Lora(), optimizer_offload=_CPU), 6.5),
        (Strategy(lora=Lora(), quantization=Quantization.NF4), 7),
    ],
)
def test_how_much_of_the_training_changes(strategy: Strategy, expected: float) -> None:
    assert tier(strategy) == expected


def test_a_fixed_optimizer_is_no_change_of_the_training() -> None:
    assert tier(Strategy(optimizer=OptimizerName.ADAFACTOR), fixed={"optimizer"}) == 0


def test_labels_tell_candidates_apart() -> None:
    asked = problem(allow=frozenset(Allow), machine_fields={"nvme_bytes": 10**12})
    found = {
        replace(one, micro_batch_size=None, gradient_accumulation_steps=None): label(one, asked.topology)
        for one in candidates(asked).strategies
    }
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize("condition", ["", "if accelerator.is_main_process: "])
def test_a_script_that_saves_on_one_rank_gets_no_zero3(condition: str) -> None:
    source = read_script(
        "from accelerate import Accelerator\n"
        "from transformers import AutoModel\n"
        "accelerator = Accelerator()\n"
        "model = accelerator.prepare(AutoModel.from_pretrained('bert'))\n"
        f"{condition}accelerator.unwrap_model(model).save_pretrained('out')\n",
        name="train.py",
    )
    found = candidates(problem(num_gpus=4, source=source))
    stages = {one.zero_stage for one in found.strategies}
    rules = {finding.rule for dropped in found.dropped for finding in dropped.findings}
    assert (ZeroStage.PARAMETERS in stages) == (not condition)
    assert ("zero3-save-needs-gathered-weights" in rules) == bool(condition)
    assert ZeroStage.GRADIENTS in stages
