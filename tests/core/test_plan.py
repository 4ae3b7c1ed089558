"""Plan files: what is written reads back the same, and anything else is refused with a message."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions, Workload
from zerofit.core.plan import Origin, Plan, Reason, Rejected, Topology, plan_from_json, plan_to_json
from zerofit.core.strategy import (
    Buckets,
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
from zerofit.core.units import GIB

_SMALL = Plan(
    strategy=Strategy(),
    topology=Topology(),
    machine=Machine(
        gpus=(), num_cpu_cores=2, host_memory_bytes=16 * GIB, host_memory_available_bytes=8 * GIB
    ),
    versions=Versions(python="3.12.4", zerofit="0.1.0"),
)
_FULL = Plan(
    strategy=Strategy(
        engine=Engine.DEEPSPEED,
        zero_stage=ZeroStage.PARAMETERS,
        optimizer_offload=OffloadDevice.NVME,
        param_offload=OffloadDevice.CPU,
        nvme_path="/local nvme/ü",
        pin_memory=False,
        precision=Precision.BF16,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_clipping=0.1,
        gradient_checkpointing=True,
        optimizer=OptimizerName.ADAMW_8BIT,
        attention="flash_attention_2",
        compile=True,
        freeze=("embed.*", "lm_head"),
        lora=Lora(rank=8, alpha=16, dropout=0.05, target_modules=("q_proj", "v_proj")),
        checkpoint_every=3,
        activation_offload=True,
        quantization=Quantization.NF4,
        quant_storage=Precision.BF16,
        tf32=True,
        liger=True,
        group_by_length=True,
        buckets=Buckets(reduce_bucket_size=1, sub_group_size=2),
        reshard_after_forward=False,
        state_dict_type=StateDictType.FULL,
    ),
    topology=Topology(num_nodes=2, world_size=16, on_cpu=False),
    machine=Machine(
        gpus=(
            GpuSpec(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB, compute_capability=(9, 0)),
            GpuSpec(name="another", memory_bytes=64 * GIB),
        ),
        num_cpu_cores=32,
        host_memory_bytes=512 * GIB,
        host_memory_available_bytes=500 * GIB,
    ),
    versions=Versions(
        python="3.12.4",
        zerofit="0.1.0",
        torch="2.13.0",
        accelerate="1.15.0",
        deepspeed="0.19.8",
        transformers="5.23.0",
        huggingface_hub="2.4.0",
        peft="0.21.2",
        bitsandbytes="0.50.2",
    ),
    workload=Workload(global_batch_size=128, sequence_length=2048),
    model=ModelFacts(
        name="model",
        model_type="llama",
        num_parameters=7_000_000_000,
        num_trainable_parameters=6_000_000_000,
        num_layers=32,
        hidden_size=4096,
        vocab_size=32000,
        max_sequence_length=4096,
    ),
    reasons=(Reason(field="zero_stage", value="3", origin=Origin.FLAG, why="--zero-stage says so"),),
    rejected=(Rejected(strategy=Strategy(), why="does not fit"),),
)


@pytest.mark.parametrize("plan", [_SMALL, _FULL], ids=["small", "full"])
def test_a_plan_reads_back_the_same(plan: Plan) -> None:
    text = plan_to_json(plan)
    assert plan_from_json(text, name="plan.json") == plan
    assert plan_to_json(plan_from_json(text, name="plan.json")) == text


def test_the_full_plan_leaves_no_field_of_the_strategy_at_its_default() -> None:
    default = Strategy()
    pairs = {
        field.name: (getattr(_FULL.strategy, field.name), getattr(default, field.name))
        for field in fields(Strategy)
    }
    assert [name for name, (full, small) in pairs.items() if full == small] == []


def test_plan_file_text(golden: Callable[[str, str], None]) -> None:
    golden(plan_to_json(_FULL), "plan/full.json")


def _changed(path: str, value: object) -> str:
    """Return a plan file with one field set; "a.b" is field b of a."""
    document = json.loads(plan_to_json(_FULL))
    *above, last = path.split(".")
    place = document
    for name in above:
        place = place[name]
    place[last] = value
    return json.dumps(document)


def _without(path: str) -> str:
    document = json.loads(_changed(path, None))
    place = document
    *above, last = path.split(".")
    for name in above:
        place = place[name]
    del place[last]
    return json.dumps(document)


_CUT = "it is incomplete JSON, as after an interrupted write"
_OTHER_VERSION = "this zerofit reads plan files of version 1"
_FIELDS = "every field must be known, of the right type and in range"


def _check_refusal(text: str, found: str, why: str) -> None:
    with pytest.raises(UserError) as error:
        plan_from_json(text, name="runs/plan.json")
    assert str(error.value) == (
        "error[plan-file-broken]: the plan file can't be read\n"
        f"  found: {found}   (runs/plan.json)\n"
        f"  why:   {why}\n"
        "  fix:   write the plan again, or leave out --plan"
    )
    assert error.value.exit_code == 2


_TEXT = plan_to_json(_SMALL)
_EMPTY = "Expecting value: line 1 column 1 (char 0)"
_HALF = "Unterminated string starting at: line 3 column 15 (char 32)"
_MORE = f"Extra data: line {_TEXT.count(chr(10)) + 1} column 1 (char {len(_TEXT)})"


@pytest.mark.parametrize(
    ("text", "found"), [("", _EMPTY), ("\0", _EMPTY), (plan_to_json(_FULL)[:40], _HALF), (_TEXT + "}", _MORE)]
)
def test_a_file_that_was_not_written_whole_is_refused(text: str, found: str) -> None:
    _check_refusal(text, found, _CUT)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}", "no version field"),
        ("[1]", "no version field"),
        ("null", "no version field"),
        (_without("version"), "no version field"),
        (_changed("version", 2), "version 2"),
        (_changed("version", "1"), "version '1'"),
    ],
)
def test_a_file_of_another_version_is_refused(text: str, found: str) -> None:
    _check_refusal(text, found, _OTHER_VERSION)


_UNKNOWN, _NO_INTEGER = "Unexpected keyword argument", "Input should be a valid integer"
_MISSPELT_GPU = [{"name": "x", "memory_bytes": 1, "memory_gb": 1}]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (_without("machine"), "machine: Field required"),
        (_changed("version", True), f"version: {_NO_INTEGER}"),
        (_changed("notes", ""), f"notes: {_UNKNOWN}"),
        (_changed("strategy.zero_stages", 3), f"strategy.zero_stages: {_UNKNOWN}"),
        (_changed("machine.gpus", _MISSPELT_GPU), f"machine.gpus.0.memory_gb: {_UNKNOWN}"),
        (_changed("strategy.micro_batch_size", "4"), f"strategy.micro_batch_size: {_NO_INTEGER}"),
        (_changed("strategy.micro_batch_size", 4.0), f"strategy.micro_batch_size: {_NO_INTEGER}"),
        (_changed("strategy.compile", 1), "strategy.compile: Input should be a valid boolean"),
        (_changed("strategy.zero_stage", 5), "strategy.zero_stage: Input should be 0, 1, 2 or 3"),
        (
            _changed("strategy.optimizer_offload", "disk"),
            "strategy.optimizer_offload: Input should be 'none', 'cpu' or 'nvme'",
        ),
    ],
)
def test_a_field_that_is_missing_unknown_or_of_another_kind_is_refused(text: str, found: str) -> None:
    _check_refusal(text, found, _FIELDS)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("topology.num_nodes", 0),
        ("topology.world_size", 0),
        ("topology.world_size", -2),
        ("strategy.micro_batch_size", 0),
        ("strategy.gradient_accumulation_steps", -1),
        ("strategy.gradient_clipping", -1.0),
        ("strategy.gradient_clipping", float("nan")),
        ("machine.num_cpu_cores", 0),
        ("workload.global_batch_size", 0),
    ],
)
def test_a_number_that_no_flag_would_take_is_refused_in_a_file_too(path: str, value: float) -> None:
    with pytest.raises(UserError) as error:
        plan_from_json(_changed(path, value), name="plan.json")
    assert (error.value.rule, error.value.found.startswith(f"{path}: ")) == ("plan-file-broken", True)


def test_a_plan_of_before_gpus_had_a_context_reads_back() -> None:
    document = json.loads(plan_to_json(_FULL))
    for gpu in document["machine"]["gpus"]:
        del gpu["context_bytes"], gpu["context_source"]
    assert plan_from_json(json.dumps(document), name="plan.json") == _FULL


def test_a_gpus_context_without_a_source_is_refused_in_a_file_too() -> None:
    gpu = {"name": "x", "memory_bytes": 1, "context_bytes": 1}
    with pytest.raises(UserError) as error:
        plan_from_json(_changed("machine.gpus", [gpu]), name="plan.json")
    assert "context_bytes: 1 with context_source '': both stand, or neither" in error.value.found


def test_no_cut_of_a_plan_file_reads_as_a_plan() -> None:
    text = plan_to_json(_FULL)
    for end in range(len(text) - 1):
        with pytest.raises(UserError):
            plan_from_json(text[:end], name="plan.json")


@pytest.mark.parametrize(
    ("topology", "data_parallel_size", "ranks_per_node"),
    [
        (Topology(), 1, 1),
        (Topology(world_size=8), 8, 8),
        (Topology(num_nodes=2, world_size=16), 16, 8),
        (Topology(num_nodes=4, world_size=4), 4, 1),
        (Topology(world_size=8, tensor_parallel_size=2), 4, 8),
        (Topology(num_nodes=2, world_size=8, tensor_parallel_size=8), 1, 4),
        (Topology(world_size=8, sequence_parallel_size=4), 2, 8),
        (Topology(world_size=8, tensor_parallel_size=2, sequence_parallel_size=4), 1, 8),
    ],
)
def test_ranks(topology: Topology, data_parallel_size: int, ranks_per_node: int) -> None:
    assert (topology.data_parallel_size, topology.ranks_per_node) == (data_parallel_size, ranks_per_node)


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_ranks_make_whole_groups(kind: str) -> None:
    with pytest.raises(ValueError, match="world_size: 3 ranks are no whole groups of 2"):
        Topology(world_size=3, **{f"{kind}_parallel_size": 2})


@pytest.mark.parametrize("name", ["tensor_parallel_size", "sequence_parallel_size"])
def test_a_plan_names_a_parallelism_where_there_is_some(name: str) -> None:
    assert name not in plan_to_json(_FULL)
    cut = replace(_FULL, topology=replace(_FULL.topology, **{name: 4}))
    assert json.loads(plan_to_json(cut))["topology"][name] == 4
    assert plan_from_json(plan_to_json(cut), name="plan.json") == cut
