"""FSDP2 by zerofit's own flags: the engine, its settings and their places, and the plan made of them."""

from __future__ import annotations

from typing import Any

import pytest
from planning_problems import machine

from zerofit.core.errors import UserError
from zerofit.core.facts import Versions
from zerofit.core.plan import Plan, plan_from_json, plan_to_json
from zerofit.core.strategy import Engine, OffloadDevice, StateDictType, Strategy
from zerofit.planning.applied_table import applied_rows
from zerofit.planning.plan_from_flags import choose
from zerofit.planning.resolve import Verb, resolve

_CPU = OffloadDevice.CPU
_VERSIONS = Versions(python="3.12.4", zerofit="0.1.0")


def _plan(**settings: Any) -> Plan:
    spec = resolve(None, verb=Verb.CONFIG, **{"num_processes": 8, **settings})
    return choose(machine=machine(), versions=_VERSIONS, spec=spec, has_these_gpus=False)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"engine": "fsdp2"}, {}),
        ({"engine": Engine.FSDP2, "reshard_after_forward": True}, {}),
        ({"engine": "fsdp2", "reshard_after_forward": False}, {"reshard_after_forward": False}),
        ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
        ({"state_dict_type": "FULL_STATE_DICT"}, {"state_dict_type": StateDictType.FULL}),
        (
            {"engine": "fsdp2", "offload_param": "cpu"},
            {"optimizer_offload": _CPU, "param_offload": _CPU},
        ),
        (
            {"engine": "fsdp2", "optimizer_offload": "cpu"},
            {"optimizer_offload": _CPU, "param_offload": _CPU},
        ),
        ({"engine": "fsdp2", "num_processes": 1}, {}),
    ],
)
def test_flags_make_a_strategy_of_fsdp2(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    strategy = _plan(mixed_precision="bf16", **settings).strategy
    assert strategy == Strategy(engine=Engine.FSDP2, precision=strategy.precision, **expected)


@pytest.mark.parametrize(("copies", "shards"), [(1, 8), (2, 4), (4, 2)])
def test_hybrid_sharding_is_of_the_topology(copies: int, shards: int) -> None:
    topology = _plan(dp_replicate_size=copies).topology
    assert (topology.dp_replicate_size, topology.dp_shard_size) == (copies, shards)


@pytest.mark.parametrize("copies", [3, 5, 6, 7, 16])
def test_copies_divide_the_ranks(copies: int) -> None:
    with pytest.raises(UserError, match="hybrid-shards-not-whole"):
        _plan(engine="fsdp2", dp_replicate_size=copies)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 24])
def test_a_copy_for_each_rank_is_refused(ranks: int) -> None:
    with pytest.raises(UserError, match="hybrid-shards-of-one-rank"):
        _plan(engine="fsdp2", dp_replicate_size=ranks, num_processes=ranks)


def test_the_table_of_changes_has_what_fsdp2_shards_and_saves() -> None:
    plan = _plan(reshard_after_forward=False, state_dict_type="FULL_STATE_DICT", dp_replicate_size=2)
    rows = {row.what: (row.runs, row.why) for row in applied_rows(plan)}
    assert rows["gathered weights"] == (
        "kept until the backward pass",
        "--no-reshard-after-forward says so",
    )
    assert rows["copies of weights"] == ("2, each over 4 ranks", "--dp-replicate-size says so")
    assert rows["checkpoints"] == ("whole weights, by rank 0", "--state-dict-type says so")


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("engine", "fsdp2", "--engine"),
        ("reshard_after_forward", False, "--no-reshard-after-forward"),
        ("reshard_after_forward", True, "--reshard-after-forward"),
        ("state_dict_type", "SHARDED_STATE_DICT", "--state-dict-type"),
        ("dp_replicate_size", 2, "--dp-replicate-size"),
    ],
)
def test_each_setting_of_fsdp2_names_its_flag_and_the_engine(name: str, value: Any, flag: str) -> None:
    said = resolve(None, verb=Verb.PLAN, **{name: value}).overrides
    assert said.where(name) == flag
    assert (said.get("engine"), said.where("engine")) == (Engine.FSDP2, flag)


def test_a_plan_file_has_all_settings_of_fsdp2() -> None:
    plan = _plan(reshard_after_forward=False, state_dict_type="FULL_STATE_DICT", dp_replicate_size=2)
    read = plan_from_json(plan_to_json(plan), name="plan.json")
    assert (read.strategy, read.topology) == (plan.strategy, plan.topology)
