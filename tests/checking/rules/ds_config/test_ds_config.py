"""Findings in ds_config.json by itself: keys, params, values and switches."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ds_config_findings import found_in, verdict

from zerofit.checking.engine import Finding
from zerofit.configs.document import RemoveKey, RenameKey, SetValue
from zerofit.core.command import Route
from zerofit.core.plan import Topology

_M = {"train_micro_batch_size_per_gpu": 4}
_ON = {"enabled": True}


def _zero(stage: Any = 2, **more: Any) -> dict[str, Any]:
    return {**_M, "zero_optimization": {"stage": stage, **more}}


_KEYS = (
    _zero(),
    {**_M, "zero_optimisation": {"stage": 3}},
    {**_zero(), "Zero-Optimization": {"stage": 3}},  # the right key is there too: which of them counts?
    _zero(Overlap_Comm=True),
    {**_zero(), "stage3_param_persistence_threshold": 0},
    _zero(gradient_clipping=1.0),
    # A name says where a key belongs only if its value fits there.
    {**_zero(), "fp16": {"fp16": True}},
    {**_zero(), "model_parallel_size": 2},  # model is not data misspelt
    {**_zero(), "compile": {"passes": ["autosp"]}, "sequence_parallel_size": 2},
    _zero(offload_optimizer={"device": "cpu", "max_in_cpu": 1e9}),
    # Whoever reads the file in a script may keep keys in it, and people keep notes.
    {**_zero(), "_comment": "for 8 GPUs", "//": 1, "comment": "x", "description": "y"},
    {**_zero(), "learning_rate_of_mine": 1, "seed": 1},
    {**_zero(), **{f"mine{n}": n for n in range(8)}},
    # A name without an underscore tells where it belongs only if nothing else is called so.
    {**_M, "stage": 3},
    _zero(hysteresis=2),
    # What integrations read is not unknown.
    {**_zero(), "msamp": {"enabled": True}, "inference": {}, "sequence_parallel_size": 1},
    # optimizer.name is no key: DeepSpeed would have no optimizer.
    {**_zero(), "optimizer": {"name": "AdamW", "params": {"lr": 0.1}}},
    {**_zero(), "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
    {**_zero(), "amp": {"enabled": False}},
    {**_zero(), "amp": {"enabled": True}},
    {**_zero(), "compression_training": {"layer_reduction": {"enabled": True}}},
    {**_zero(), "sparse_gradients": False},
    _zero(mics_shard_size=8),
    _zero(stage3_gather_fp16_weights_on_model_save=True),
    _zero(cpu_offload=True),
    _zero(cpu_offload=False),
    _zero(cpu_offload=False, offload_optimizer={"device": "none"}),
    _zero(max_live_parameters=1, stage3_max_live_parameters=2),
    _zero(max_live_parameters=1),
)
_PARAMS = (
    # Params are held against the type beside them, where DeepSpeed has it itself.
    {**_zero(), "optimizer": {"type": "SomethingOfTorch", "params": {"anything": 1}}},
    {**_zero(), "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decays": 0.1}}},
    {**_zero(), "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}},
    {**_zero(), "optimizer": {"type": "AdamW", "params": {"learning_rate": 0.1}}},
    # What a scheduler lacks.
    {**_zero(), "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}},
    {**_zero(), "scheduler": {"type": "OneCycle"}},
    {**_zero(), "scheduler": {"type": "StepLR"}},
    # Refused before it is missed, and perhaps the missing one itself.
    {**_zero(), "scheduler": {"type": "WarmupDecayLR", "params": {"total_steps": 10}}},
    {**_zero(), "scheduler": {"type": "WarmupLR", "params": {}}},
    {**_zero(), "scheduler": {}},
    {**_zero(), "optimizer": {"type": "AdamW"}},
)
_VALUES = (
    _zero(stage=4),
    _zero(stage="two"),
    _zero(reduce_bucket_size="5e8"),
    _zero(reduce_bucket_size=0),
    _zero(reduce_bucket_size=None),
    _zero(contiguous_gradients="maybe"),
    _zero(offload_optimizer="cpu"),
    _zero(offload_optimizer={"device": "CPU"}),
    _zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 1.5}),
    {**_zero(), "gradient_accumulation_steps": "8"},
    {**_zero(), "gradient_accumulation_steps": 0},
    {**_zero(), "gradient_clipping": "1.0"},
    {**_zero(), "wall_clock_breakdown": "false"},
    {**_zero(), "communication_data_type": "float16"},
    {**_zero(), "activation_checkpointing": None},
    {**_zero(), "checkpoint": {"tag_validation": "maybe"}},
    {**_zero(), "fp16": {"min_loss_scale": 0.5}},
    {**_zero(), "fp16": {"loss_scale": "dynamic"}},
    {**_zero(), "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
    {**_zero(), "optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}},
    # Values that DeepSpeed takes.
    _zero(stage="2"),
    _zero(reduce_bucket_size=5e8),
    _zero(reduce_bucket_size="500000000"),
    _zero(overlap_comm=None),
    _zero(contiguous_gradients="Yes"),
    _zero(offload_optimizer=None),
    _zero(leaf_module={"classes": "Block"}),
    {**_zero(), "gradient_accumulation_steps": 2.0},
    {**_zero(), "gradient_clipping": 0},
    {**_zero(), "wall_clock_breakdown": 0},
    {**_zero(), "communication_data_type": "FP16"},
    {**_zero(), "checkpoint": {"tag_validation": "WARN", "writer": None}},
    {**_zero(), "aio": None},
    {**_zero(), "flops_profiler": {"profile_step": "x"}},  # not looked at before the profiler is on
    # While DeepSpeed tunes, a list holds the values to try.
    {**_zero(stage=[1, 2]), "autotuning": {"enabled": True}},
)
_SWITCHES = (
    {**_zero(), "fp16": _ON},
    {**_zero(), "fp16": {"enabled": "True"}, "bf16": {"enabled": 1}},
    {**_zero(), "fp16": _ON, "bfloat16": _ON},
    # The old section counts only where the new one is missing.
    {**_zero(), "fp16": _ON, "bfloat16": _ON, "bf16": {"enabled": False}},
    {**_zero(), "fp16": {**_ON, "loss_scale_window": 0}},
    {**_zero(), "fp16": {**_ON, "loss_scale": 128, "min_loss_scale": 0}},
    _zero(3, compute_grad_norm=False),
    _zero(1, compute_grad_norm=False),
    _zero(0, offload_optimizer={"device": "none", "ratio": 0.5}),
    {**_zero(0), "fp16": {"fp16_master_weights_and_grads": True}},
    {**_zero(1), "bf16": {"bf16_optimizer_states": True}},
    {**_zero(1), "gradient_allreduce_op": "SUM", "compile": {"deepcompile": True}},
    {**_zero(1), "gradient_allreduce_op": "sum"},
    {**_zero(2), "gradient_predivide_factor": 2.0},
    {**_zero(2, reduce_scatter=False), "prescale_gradients": True},
    {**_zero(1), "prescale_gradients": True},
    _zero(2, zero_quantized_weights=True, zero_hpz_partition_size=8),
    _zero(2, zero_quantized_gradients=False, zero_hpz_partition_size=1),
    _zero(3, zero_quantized_gradients=True, zero_hpz_partition_size=8),
    {**_zero(), "gradient_clipping": -1},
    {**_zero(), "gradient_clipping": 0},
)


def _said(config: dict[str, Any], findings: tuple[Finding, ...]) -> str:
    lines = [json.dumps(config)]
    for finding in findings:
        lines.append(f"  {finding.rule}: {finding.found}\n    fix: {finding.fix}")
        lines += [f"    {_edit(edit)}" for edit in finding.edits]
    return "\n".join(lines) + "\n"


def _edit(edit: Any) -> str:
    path = ".".join(edit.path)
    if isinstance(edit, SetValue):
        return f"set {path} to {edit.value!r}"
    return f"rename {path} to {edit.key}" if isinstance(edit, RenameKey) else f"remove {path}"


@pytest.mark.parametrize(
    ("name", "configs"), {"keys": _KEYS, "params": _PARAMS, "values": _VALUES, "switches": _SWITCHES}.items()
)
def test_what_is_found_natively(name: str, configs: tuple[dict[str, Any], ...], golden: Any) -> None:
    said = [_said(config, verdict(config, route=Route.NATIVE).findings) for config in configs]
    golden("".join(said), f"findings/deepspeed_{name}.txt")


_DS = "ds_config.json"


@pytest.mark.parametrize(
    ("text", "route", "expected", "unknown"),
    [
        ('{"train_batch_size": 4, "train_batch_size": 8}', None, ["train_batch_size twice: 4 and 8"], False),
        ('{"train_batch_size": 8, "train_batch_size": 8}', None, [], True),
        (
            '{"train_batch_size": 8, "train_batch_size": 8}',
            Route.NATIVE,
            ["train_batch_size twice: 8 and 8"],
            False,
        ),
        ('{"train_batch_size": 8, "train_batch_size": 8}', Route.TRAINER, [], False),
        (
            '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage": "3"}}',
            Route.TRAINER,
            ['zero_optimization.stage twice: 3 and "3"'],
            False,
        ),
        (
            '{"train_batch_size": 8, "fp16": {"enabled": true, "enabled": false}}',
            Route.TRAINER,
            ["fp16.enabled twice: true and false"],
            False,
        ),
    ],
)
def test_repeated_keys(text: str, route: Route | None, expected: list[str], unknown: bool) -> None:
    said = verdict(text, route=route)
    assert [f.found for f in said.findings if f.rule == "deepspeed-key-repeated"] == expected
    assert ("deepspeed-key-repeated" in {u.rule for u in said.unknown}) is unknown


def test_a_finding_stands_where_the_key_stands() -> None:
    text = '{\n  "train_batch_size": 8,\n  "zero_optimization": {\n    "stages": 2\n  }\n}\n'
    (finding,) = verdict(text, route=Route.NATIVE).findings
    assert (str(finding.place), finding.place.column if finding.place else None) == (f"{_DS}:4", 5)


@pytest.mark.parametrize(
    ("route", "confidence"),
    [(None, "likely"), (Route.NATIVE, "likely"), (Route.ACCELERATE, "certain"), (Route.TRAINER, "certain")],
)
def test_a_script_of_its_own_may_add_the_steps(route: Route | None, confidence: str) -> None:
    config = {**_zero(), "scheduler": {"type": "WarmupDecayLR", "params": {}}}
    (finding,) = verdict(config, route=route).findings
    assert (finding.rule, finding.confidence) == ("deepspeed-params-incomplete", confidence)
    config["scheduler"]["params"]["total_num_steps"] = "auto"
    assert "deepspeed-params-incomplete" not in {f.rule for f in verdict(config, route=route).findings}


def test_params_are_refused_for_a_reason_of_their_own() -> None:
    config = {**_zero(overlap=True), "optimizer": {"type": "AdamW", "params": {"weight_decays": 0.1}}}
    whys = {finding.found: finding.why for finding in verdict(config, route=Route.NATIVE).findings}
    assert whys == {
        "zero_optimization.overlap=true": "these sections are validated, and an unknown key ends the run",
        "optimizer.params.weight_decays=0.1": "params are arguments of a constructor, which raises an "
        "error for an unknown one",
    }


def test_what_accelerate_overwrites_counts_natively_only() -> None:
    config = {**_zero(), "steps_per_print": 0}
    (finding,) = verdict(config, route=Route.NATIVE).findings
    assert (finding.found, finding.fix) == ("steps_per_print=0", "give a number greater than 0")
    assert verdict(config, route=Route.ACCELERATE).findings == ()
    unknown = [(u.rule, u.fact) for u in verdict(config).unknown]
    assert ("deepspeed-value-refused", "the library that reads it") in unknown


def test_an_open_question_keeps_no_certain_finding_back() -> None:
    config = {"steps_per_print": 0, **_zero(stage=4)}
    assert found_in(config) == ["deepspeed-value-refused: zero_optimization.stage=4"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dump_state": "false"}, ['deepspeed-text-is-true: dump_state="false"']),
        ({"dump_state": "true"}, []),
        ({"aio": {"single_submit": "No"}}, ['deepspeed-text-is-true: aio.single_submit="No"']),
        ({"zero_optimization": {"stage": 2, "overlap_comm": "false"}}, []),
    ],
)
def test_texts_for_booleans(config: dict[str, Any], expected: list[str]) -> None:
    assert found_in({**_zero(), **config}, route=Route.NATIVE) == expected


_GATHER = "stage3_gather_16bit_weights_on_model_save"


@pytest.mark.parametrize(
    ("config", "route", "expected"),
    [
        (_zero(3), Route.TRAINER, [f"zero_optimization.stage=3 with no zero_optimization.{_GATHER}"]),
        (
            _zero(3, **{_GATHER: False}),
            Route.ACCELERATE,
            [f"zero_optimization.stage=3 with zero_optimization.{_GATHER}=false"],
        ),
        (_zero(3, **{_GATHER: True}), Route.TRAINER, []),
        # DeepSpeed knows the alias, and accelerate asks DeepSpeed.
        (_zero(3, gather_16bit_weights_on_model_save=True), Route.ACCELERATE, []),
        (_zero(2), Route.TRAINER, []),
        (_zero(3), Route.NATIVE, []),
    ],
    ids=str,
)
def test_whole_weights_at_zero3(config: dict[str, Any], route: Route, expected: list[str]) -> None:
    findings = verdict(config, route=route).findings
    assert [(f.rule, f.found) for f in findings] == [("zero3-weights-need-gather", text) for text in expected]


@pytest.mark.parametrize(
    ("stage", "route", "is_found"),
    [(2, Route.ACCELERATE, True), (2, Route.NATIVE, False), (3, Route.ACCELERATE, False)],
)
def test_whole_weights_under_tensor_parallelism(stage: int, route: Route, is_found: bool) -> None:
    config = {**_zero(stage), "tensor_parallel": {"autotp_size": 2}}
    found = [finding.rule for finding in verdict(config, route=route).findings]
    assert ("tensor-parallel-without-gathered-saving" in found) is is_found


@pytest.mark.parametrize(
    ("stage", "route", "is_found"),
    [
        ("3", Route.ACCELERATE, True),
        (" 3", Route.TRAINER, True),
        ("3", Route.NATIVE, False),
        (3, Route.TRAINER, False),
        ("2", Route.TRAINER, False),  # compared with 3 only
    ],
)
def test_zero3_as_a_text(stage: Any, route: Route, is_found: bool) -> None:
    findings = verdict(_zero(stage, **{_GATHER: True}), route=route).findings
    edit = SetValue(document="ds_config.json", path=("zero_optimization", "stage"), value=3)
    expected = [("zero-stage-is-a-number", f'zero_optimization.stage="{stage}", a string', (edit,))]
    assert [(f.rule, f.found, f.edits) for f in findings] == (expected if is_found else [])


def test_auto_for_gathering_asks_for_the_command_line() -> None:
    said = verdict(_zero(3, **{_GATHER: "auto"}), route=Route.ACCELERATE)
    assert [(u.rule, u.fact) for u in said.unknown] == [("zero3-weights-need-gather", "the launch command")]


def test_the_old_name_of_bf16() -> None:
    config = {**_zero(), "bfloat16": _ON}
    for route in (Route.ACCELERATE, Route.TRAINER):
        (finding,) = verdict(config, route=route).findings
        assert (finding.rule, finding.found) == ("bfloat16-is-bf16", "bfloat16.enabled=true")
        assert finding.edits == (RenameKey(document="ds_config.json", path=("bfloat16",), key="bf16"),)
    assert verdict(config, route=Route.NATIVE).findings == ()


def test_the_old_switch_of_offload() -> None:
    config = _zero(cpu_offload=True)
    expected = "zero_optimization.cpu_offload=true"
    assert found_in(config, route=Route.TRAINER) == [f"cpu-offload-is-offload-optimizer: {expected}"]
    assert found_in(config) == [f"deepspeed-key-deprecated: {expected}"]
    assert found_in({**config, "optimizer": {"type": "AdamW"}}, route=Route.TRAINER) == [
        f"deepspeed-key-deprecated: {expected}"
    ]


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (_zero(offload_optimizer=None), [("zero_optimization", "offload_optimizer")]),
        ({**_zero(), "bf16": None}, [("bf16",)]),
        # accelerate looks there for an optimizer of the script only.
        ({**_zero(offload_optimizer=None), "optimizer": {"type": "AdamW"}}, []),
        (_zero(offload_param=None), []),
    ],
    ids=str,
)
def test_sections_that_are_null(config: dict[str, Any], paths: list[tuple[str, ...]]) -> None:
    findings = verdict(config, route=Route.TRAINER).findings
    assert [(f.rule, f.found, f.edits) for f in findings] == [
        (
            "deepspeed-section-is-null",
            f"{'.'.join(path)}=null",
            (RemoveKey(document="ds_config.json", path=path),),
        )
        for path in paths
    ]
    assert verdict(config, route=Route.NATIVE).findings == ()


@pytest.mark.parametrize(
    ("text", "route", "expected"),
    [
        ('{"a": 1', Route.NATIVE, "deepspeed-syntax"),
        ('{"train_batch_size": 8, "zero_optimization": {},}', Route.TRAINER, "deepspeed-hjson-needs-native"),
        ('{"train_batch_size": 8, "zero_optimization": {},}', Route.NATIVE, None),
        ('{"train_batch_size": 8}', Route.TRAINER, "deepspeed-zero-section-missing"),
        (
            '{"train_batch_size": 8, "zero_optimization": true}',
            Route.TRAINER,
            "deepspeed-zero-section-missing",
        ),
        ('{"train_batch_size": 8, "zero_optimization": true}', Route.NATIVE, None),
        ('{"train_batch_size": 8}', Route.NATIVE, None),
    ],
)
def test_files(text: str, route: Route, expected: str | None) -> None:
    findings = verdict(text, route=route).findings
    assert [f.rule for f in findings] == ([expected] if expected else [])


def test_rules_are_unknown_without_the_schema() -> None:
    said = verdict({"zero_optimisation": {}, "train_batch_size": 8}, is_schema_known=False)
    assert "deepspeed-key-misspelt" in {unknown.rule for unknown in said.unknown}
    assert {unknown.fact for unknown in said.unknown if unknown.rule == "deepspeed-key-misspelt"} == {
        "DeepSpeed's keys"
    }


@pytest.mark.parametrize(
    ("size", "is_found"),
    [(3, True), (2, False), (1, False), (True, False), ("3", False), (None, False), ([], False)],
)
def test_groups_of_tensor_parallelism_are_those_of_a_whole_number(size: Any, is_found: bool) -> None:
    config = {**_zero(), "tensor_parallel": {"autotp_size": size}}
    found = [finding.rule for finding in verdict(config, topology=Topology(world_size=4)).findings]
    assert ("tensor-parallel-groups-not-whole" in found) is is_found


@pytest.mark.parametrize(
    ("fp16", "is_on"),
    [
        (True, True),
        (1, True),
        ("true", True),
        ("TRUE", True),
        (False, False),
        (0, False),
        ("no", False),
        (2, False),
    ],
)
def test_two_number_formats_are_refused_where_both_are_on(fp16: Any, is_on: bool) -> None:
    config = {**_zero(), "fp16": {"enabled": fp16}, "bf16": _ON}
    found = [finding.rule for finding in verdict(config, route=Route.NATIVE).findings]
    assert ("deepspeed-fp16-and-bf16" in found) is is_on
