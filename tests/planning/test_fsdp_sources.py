"""FSDP in accelerate's files and flags and in TrainingArguments: read as FSDP2, with places and sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planning_problems import problem

from zerofit.checking.inputs.fsdp import read_fsdp
from zerofit.checking.inputs.fsdp_words import words_of_trainer
from zerofit.checking.launch_line import read_line
from zerofit.core.errors import UserError
from zerofit.core.observer import Observer
from zerofit.core.setting import Said
from zerofit.core.strategy import Engine, OffloadDevice, StateDictType, ZeroStage
from zerofit.planning.resolve import Verb, resolve
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.solve import files_as_they_say

_CPU, _NONE = OffloadDevice.CPU, OffloadDevice.NONE
_FULL, _SHARDED = StateDictType.FULL, StateDictType.SHARDED
_OFFLOADED = {"optimizer_offload": _CPU, "param_offload": _CPU}
_FIELDS = (
    "engine",
    "zero_stage",
    "reshard_after_forward",
    "state_dict_type",
    "optimizer_offload",
    "param_offload",
    "gradient_checkpointing",
    "activation_offload",
    "dp_replicate_size",
)
_TRAINS = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("gpt2")
arguments = TrainingArguments(
    output_dir="out",
    {arguments}
)
Trainer(model=model, args=arguments).train()
"""
_PARSES = """\
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model=AutoModelForCausalLM.from_pretrained("gpt2"), args=arguments).train()
"""


class _Said(Observer):
    """Keeps what resolve says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    Path("train.py").write_text("")
    return tmp_path


def _yaml(section: dict[str, Any], **top: Any) -> str:
    lines = ["distributed_type: FSDP", *(f"{name}: {value}" for name, value in top.items()), "fsdp_config:"]
    return "\n".join([*lines, *(f"  {name}: {value}" for name, value in section.items()), ""])


def _config(name: str, said: _Said | None = None, **settings: Any) -> RunSpec:
    is_json = name.endswith(".json")
    return resolve(
        None,
        verb=Verb.CONFIG,
        config_file=None if is_json else name,
        deepspeed_file=name if is_json else None,
        observer=said or _Said(),
        **settings,
    )


def _given(spec: RunSpec) -> dict[str, Any]:
    return {name: spec.overrides.get(name) for name in _FIELDS if spec.overrides.has(name)}


_VERSION_2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, {}),
        ({"fsdp_reshard_after_forward": "true"}, {"reshard_after_forward": True}),
        ({"fsdp_reshard_after_forward": "false"}, {"reshard_after_forward": False}),
        ({"fsdp_reshard_after_forward": "'off'"}, {"reshard_after_forward": False}),
        ({"reshard_after_forward": "false"}, {"reshard_after_forward": False}),
        ({"fsdp_offload_params": "true"}, _OFFLOADED),
        ({"fsdp_offload_params": "false"}, {}),
        ({"fsdp_state_dict_type": "FULL_STATE_DICT"}, {"state_dict_type": _FULL}),
        ({"fsdp_state_dict_type": "sharded_state_dict"}, {"state_dict_type": _SHARDED}),
        ({"fsdp_state_dict_type": "3"}, {"state_dict_type": _SHARDED}),
        ({"fsdp_activation_checkpointing": "true"}, {"gradient_checkpointing": True}),
        (
            {"fsdp_activation_checkpointing": "true", "fsdp_activation_checkpointing_offload": "true"},
            {"gradient_checkpointing": True, "activation_offload": True},
        ),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {}),  # accelerate ignores it under version 2
        ({"fsdp_forward_prefetch": "true", "fsdp_use_orig_params": "true"}, {}),
        ({"fsdp_activation_checkpointing_offload": "false", "fsdp_ignored_modules": "''"}, {}),
    ],
)
def test_a_file_of_version_2_is_read(section: dict[str, str], expected: dict[str, Any]) -> None:
    Path("acc.yaml").write_text(_yaml({**_VERSION_2, **section}))
    assert _given(_config("acc.yaml")) == {"engine": Engine.FSDP2, **expected}


@pytest.mark.parametrize(
    ("section", "top", "expected"),
    [
        ({}, {}, {}),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, {}, {"reshard_after_forward": True}),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {}, {"reshard_after_forward": False}),
        ({"fsdp_sharding_strategy": 1}, {}, {"reshard_after_forward": True}),
        ({"fsdp_sharding_strategy": 2}, {}, {"reshard_after_forward": False}),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {"num_machines": 1}, {"reshard_after_forward": True}),
        (
            {"fsdp_sharding_strategy": "HYBRID_SHARD"},
            {"num_machines": 4, "num_processes": 16},
            {"reshard_after_forward": True, "dp_replicate_size": 4},
        ),
        (
            {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"},
            {"num_machines": 2, "num_processes": 4},
            {"reshard_after_forward": False, "dp_replicate_size": 2},
        ),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {}, {"reshard_after_forward": False}),
        (
            {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
            {},
            {"reshard_after_forward": True},
        ),
        ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, {}, {"state_dict_type": _SHARDED}),
        ({"fsdp_offload_params": "true", "fsdp_use_orig_params": "false"}, {}, _OFFLOADED),
        ({"fsdp_version": 1, "fsdp_sync_module_states": "true"}, {}, {}),
    ],
)
def test_a_file_of_version_1_is_translated(
    section: dict[str, Any], top: dict[str, Any], expected: dict[str, Any]
) -> None:
    Path("acc.yaml").write_text(_yaml(section, **top))
    said = _Said()
    # Version 1 saves whole weights if nothing else is said.
    expected = {"engine": Engine.FSDP2, "state_dict_type": _FULL, **expected}
    assert _given(_config("acc.yaml", said)) == expected
    assert "FSDP version 1 (acc.yaml:1) is planned as FSDP2, its successor" in said.lines


@pytest.mark.parametrize("policy", ["SIZE_BASED_WRAP", "NO_WRAP", None])
def test_other_units_than_blocks_are_said(policy: str | None) -> None:
    section = {} if policy is None else {"fsdp_auto_wrap_policy": policy}
    Path("acc.yaml").write_text(_yaml({"fsdp_version": 2, **section}))
    said = _Said()
    _config("acc.yaml", said)
    where = f"{policy} (acc.yaml:4)" if policy else "no auto_wrap_policy (acc.yaml:1)"
    assert said.lines[-1] == f"{where}: zerofit shards by the model's blocks, _no_split_modules"


def test_what_fsdp2_has_built_in_is_said_once() -> None:
    section = {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_sync_module_states": "true", **_VERSION_2}
    Path("acc.yaml").write_text(_yaml(section))
    said = _Said()
    _config("acc.yaml", said)
    line = "without backward_prefetch, sync_module_states (acc.yaml:3): FSDP2 has one way for each"
    assert said.lines[1:] == [line]


def test_no_shard_is_data_parallelism() -> None:
    Path("acc.yaml").write_text(_yaml({"fsdp_sharding_strategy": "NO_SHARD", "fsdp_offload_params": "false"}))
    said = _Said()
    assert _given(_config("acc.yaml", said)) == {"engine": Engine.NATIVE}
    assert said.lines[1:] == ["NO_SHARD (acc.yaml:3) is data parallelism without sharding: DDP"]


@pytest.mark.parametrize(
    ("section", "rule"),
    [
        ({"fsdp_reshard_after_forward": "FULL_SHARD"}, "fsdp-value-refused"),
        ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "fsdp-value-refused"),
        ({"fsdp_state_dict_type": "WHOLE"}, "fsdp-value-refused"),
        ({"fsdp_offload_params": "maybe"}, "fsdp-value-refused"),
        ({"fsdp_version": 3}, "fsdp-value-refused"),
        ({"fsdp_activation_checkpointing_offload": "true"}, "fsdp-value-refused"),
        ({"fsdp_ignored_modules": "lm_head"}, "fsdp-setting-not-taken"),
    ],
)
def test_what_accelerate_or_fsdp2_has_not_is_refused_with_its_line(
    section: dict[str, Any], rule: str
) -> None:
    Path("acc.yaml").write_text(_yaml({**_VERSION_2, **section}))
    with pytest.raises(UserError, match=rule) as caught:
        _config("acc.yaml")
    assert "(acc.yaml:" in str(caught.value)


def test_hybrid_sharding_of_a_parallelism_config() -> None:
    text = _yaml(_VERSION_2, num_processes=8)
    text += "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
    Path("acc.yaml").write_text(f"{text}  parallelism_config_dp_shard_size: 4\n")
    spec = _config("acc.yaml")
    assert (spec.overrides.get("dp_replicate_size"), spec.overrides.where("dp_replicate_size")) == (
        2,
        "acc.yaml:7",
    )


def test_context_parallelism_of_a_parallelism_config_is_refused() -> None:
    text = _yaml(_VERSION_2) + "parallelism_config:\n  parallelism_config_cp_size: 2\n"
    Path("acc.yaml").write_text(text)
    with pytest.raises(UserError, match="fsdp-setting-not-taken"):
        _config("acc.yaml")


_FLAGS = "--use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{_FLAGS} --fsdp_version 2", "--engine fsdp2"),
        (
            f"{_FLAGS} --fsdp_version=2 --fsdp_offload_params true",
            "--engine fsdp2 --offload-optimizer cpu --offload-param cpu",
        ),
        (
            f"{_FLAGS} --fsdp_version 2 --fsdp_reshard_after_forward false",
            "--engine fsdp2 --no-reshard-after-forward",
        ),
        (
            f"{_FLAGS} --fsdp_version 2 --fsdp_state_dict_type FULL_STATE_DICT",
            "--engine fsdp2 --state-dict-type FULL_STATE_DICT",
        ),
        (
            f"{_FLAGS} --fsdp_version 2 --fsdp_activation_checkpointing true",
            "--engine fsdp2 --gradient-checkpointing",
        ),
        (
            f"{_FLAGS} --fsdp_version 2 --use_parallelism_config --parallelism_config_dp_replicate_size 2 "
            "--parallelism_config_dp_shard_size 4",
            "--engine fsdp2 --dp-replicate-size 2",
        ),
        (
            f"{_FLAGS} --fsdp_sharding_strategy SHARD_GRAD_OP",
            "--engine fsdp2 --no-reshard-after-forward --state-dict-type FULL_STATE_DICT",
        ),
        (
            f"{_FLAGS} --num_machines 2 --fsdp_sharding_strategy HYBRID_SHARD "
            "--fsdp_state_dict_type SHARDED_STATE_DICT",
            "--num-machines 2 --engine fsdp2 --reshard-after-forward --dp-replicate-size 2 "
            "--state-dict-type SHARDED_STATE_DICT",
        ),
        (f"{_FLAGS} --fsdp_sharding_strategy NO_SHARD", "--engine native"),
        ("--multi_gpu --fsdp_offload_params true", ""),  # which accelerate ignores without FSDP
    ],
)
def test_flags_of_accelerate_are_those_of_zerofit(flags: str, words: str) -> None:
    line = read_line(f"accelerate launch {flags} train.py".split())
    assert line is not None
    assert " ".join(line.words) == words


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"reshard_after_forward": False, "state_dict_type": _FULL, **_OFFLOADED}),
        (
            "--fsdp_offload_params false",
            {
                "reshard_after_forward": False,
                "state_dict_type": _FULL,
                "optimizer_offload": _NONE,
                "param_offload": _NONE,
            },
        ),
        (
            "--fsdp_reshard_after_forward true",
            {"reshard_after_forward": True, "state_dict_type": _FULL, **_OFFLOADED},
        ),
        (
            "--fsdp_state_dict_type SHARDED_STATE_DICT",
            {"reshard_after_forward": False, "state_dict_type": _SHARDED, **_OFFLOADED},
        ),
    ],
)
def test_a_flag_overrides_its_key_of_the_file_only(flags: str, expected: dict[str, Any]) -> None:
    section = {
        "fsdp_offload_params": "true",
        "fsdp_reshard_after_forward": "false",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
    Path("acc.yaml").write_text(_yaml({**_VERSION_2, **section}))
    line = f"accelerate launch --config_file acc.yaml {flags} train.py".split()
    spec = resolve(tuple(line), verb=Verb.LAUNCH, captures=False)
    assert _given(spec) == {"engine": Engine.FSDP2, **expected}
    assert spec.overrides.where("engine") == "acc.yaml:1" if not flags else True


def test_another_engine_in_the_line_leaves_the_files_section_unread() -> None:
    Path("acc.yaml").write_text(_yaml({**_VERSION_2, "fsdp_offload_params": "true"}))
    line = ["accelerate", "launch", "--multi_gpu", "--config_file", "acc.yaml", "train.py"]
    assert _given(resolve(tuple(line), verb=Verb.LAUNCH, captures=False)) == {}


def test_a_plan_keeps_the_engine_of_a_file_and_chooses_the_rest() -> None:
    section = {"fsdp_offload_params": "true", "fsdp_reshard_after_forward": "false"}
    Path("acc.yaml").write_text(_yaml({**_VERSION_2, **section, "fsdp_state_dict_type": "FULL_STATE_DICT"}))
    line = ["accelerate", "launch", "--config_file", "acc.yaml", "train.py"]
    spec = resolve(tuple(line), verb=Verb.PLAN, gpus="8xH100")
    assert _given(spec) == {"engine": Engine.FSDP2, "state_dict_type": _FULL}
    assert spec.files is not None
    assert spec.files.overrides.get("param_offload") is _CPU
    assert spec.files.engine == "FSDP"


@pytest.mark.parametrize("flags", [{}, {"gradient_checkpointing": False}])
def test_files_offload_no_activations_where_a_flag_switches_checkpointing_off(flags: dict[str, Any]) -> None:
    switches = ("fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload")
    Path("acc.yaml").write_text(_yaml({**_VERSION_2, **dict.fromkeys(switches, "true")}))
    line = ["accelerate", "launch", "--config_file", "acc.yaml", "train.py"]
    strategy = files_as_they_say(problem(spec=resolve(tuple(line), verb=Verb.PLAN, gpus="8xH100", **flags)))
    assert strategy is not None
    assert (strategy.gradient_checkpointing, strategy.activation_offload) == (not flags, not flags)


def test_a_key_that_trainer_does_not_pass_on_is_said_to_have_no_effect() -> None:
    words = words_of_trainer(
        Said(value=True, text="fsdp"),
        {"activation_checkpointing_offload": Said(value=True, text="activation_checkpointing_offload=True")},
        transformers=None,
        num_nodes=1,
    )
    assert words is not None
    found = read_fsdp(words)
    assert "activation_offload" not in found.said
    assert found.notes == (
        "activation_checkpointing_offload (activation_checkpointing_offload=True) has no effect, as Trainer "
        "does not pass it on: --offload-activations does the same",
    )


@pytest.mark.parametrize("flags", [{"zero_stage": 3}, {"engine": "deepspeed"}, {"engine": "native"}])
def test_flags_for_another_engine_replace_the_files(flags: dict[str, Any]) -> None:
    Path("acc.yaml").write_text(_yaml({**_VERSION_2, "fsdp_offload_params": "true"}))
    line = ["accelerate", "launch", "--config_file", "acc.yaml", "train.py"]
    spec = resolve(tuple(line), verb=Verb.PLAN, gpus="8xH100", **flags)
    assert _given(spec) == {
        name: Engine(value) if name == "engine" else value for name, value in flags.items()
    }


def test_a_preset_replaces_the_engine_of_a_file() -> None:
    Path("acc.yaml").write_text(_yaml(_VERSION_2))
    line = ["accelerate", "launch", "--config_file", "acc.yaml", "train.py"]
    assert _given(resolve(tuple(line), verb=Verb.LAUNCH, preset="z3")) == {}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("fsdp=True", {"reshard_after_forward": True, "state_dict_type": _FULL}),
        ('fsdp="full_shard auto_wrap"', {"reshard_after_forward": True, "state_dict_type": _FULL}),
        ('fsdp="shard_grad_op"', {"reshard_after_forward": False, "state_dict_type": _FULL}),
        (
            'fsdp="full_shard offload auto_wrap"',
            {"reshard_after_forward": True, "state_dict_type": _FULL, **_OFFLOADED},
        ),
        (
            'fsdp=["shard_grad_op", "auto_wrap"]',
            {"reshard_after_forward": False, "state_dict_type": _FULL},
        ),
        (
            'fsdp=True, fsdp_config={"reshard_after_forward": False, "activation_checkpointing": True}',
            {"reshard_after_forward": False, "state_dict_type": _FULL, "gradient_checkpointing": True},
        ),
        (
            'fsdp=True, fsdp_config={"fsdp_state_dict_type": "SHARDED_STATE_DICT", "cpu_offload": True}',
            {"reshard_after_forward": True, "state_dict_type": _SHARDED, **_OFFLOADED},
        ),
        (
            'fsdp="hybrid_shard auto_wrap", fsdp_config={"version": 1}',
            {"reshard_after_forward": True, "state_dict_type": _FULL, "dp_replicate_size": 2},
        ),
    ],
)
def test_training_arguments_in_a_script(arguments: str, expected: dict[str, Any]) -> None:
    Path("train.py").write_text(_TRAINS.format(arguments=arguments))
    spec = resolve(("train.py",), verb=Verb.LAUNCH, captures=False, num_nodes=2, num_processes=4)
    assert _given(spec) == {"engine": Engine.FSDP2, **expected}
    assert spec.overrides.where("engine") == "train.py:6"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--fsdp",), {"reshard_after_forward": True, "state_dict_type": _FULL}),
        (("--fsdp", "shard_grad_op auto_wrap"), {"reshard_after_forward": False, "state_dict_type": _FULL}),
        (
            ("--fsdp", "--fsdp_config", "fsdp.json"),
            {"reshard_after_forward": False, "state_dict_type": _SHARDED, "gradient_checkpointing": True},
        ),
        (
            ("--fsdp=full_shard", "--fsdp_config", '{"cpu_offload": true}'),
            {"reshard_after_forward": True, "state_dict_type": _FULL, **_OFFLOADED},
        ),
    ],
)
@pytest.mark.parametrize("launcher", [(), ("torchrun", "--nproc_per_node", "4")])
def test_arguments_of_a_script(launcher: tuple[str, ...], words: tuple[str, ...], expected: Any) -> None:
    Path("train.py").write_text(_PARSES)
    config = {
        "version": 2,
        "fsdp_reshard_after_forward": False,
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": True,
    }
    Path("fsdp.json").write_text(json.dumps(config, indent=2))
    target = (*launcher, "train.py", "--output_dir", "out", *words)
    spec = resolve(target, verb=Verb.LAUNCH, captures=False)
    assert _given(spec) == {"engine": Engine.FSDP2, "reshard_after_forward": True, **expected}
    if "fsdp.json" in words:
        assert spec.overrides.where("reshard_after_forward") == "fsdp.json:3"


@pytest.mark.parametrize("arguments", ['fsdp=""', "fsdp=False", "fsdp=None", "bf16=True"])
def test_training_arguments_without_fsdp(arguments: str) -> None:
    Path("train.py").write_text(_TRAINS.format(arguments=arguments))
    assert _given(resolve(("train.py",), verb=Verb.LAUNCH, captures=False)) == {}


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--fsdp", "hybrid_shard auto_wrap"), "fsdp-value-refused"),
        (("--fsdp", "full_shard autowrap"), "fsdp-value-refused"),
        (("--fsdp", "--fsdp_config", "missing.json"), "fsdp-config-unreadable"),
        (("--fsdp", "--fsdp_config", "train.py"), "fsdp-config-unreadable"),
        (("--fsdp", "--fsdp_config", '{"xla": true}'), "fsdp-setting-not-taken"),
    ],
)
def test_arguments_that_trainer_refuses(words: tuple[str, ...], rule: str) -> None:
    Path("train.py").write_text(_PARSES)
    with pytest.raises(UserError, match=rule):
        resolve(("train.py", "--output_dir", "out", *words), verb=Verb.LAUNCH, captures=False)


@pytest.mark.parametrize(
    ("zero", "expected", "notes"),
    [
        ({"stage": 3}, {"reshard_after_forward": True}, 1),
        ({"stage": 2}, {"reshard_after_forward": False}, 1),
        ({"stage": 1}, {"reshard_after_forward": False}, 1),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            {"reshard_after_forward": True, **_OFFLOADED},
            2,
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            {"reshard_after_forward": True, **_OFFLOADED},
            1,
        ),
        (
            {"stage": 2, "reduce_bucket_size": 200000000, "offload_optimizer": {"device": "cpu"}},
            {"reshard_after_forward": False, **_OFFLOADED},
            3,
        ),
    ],
)
def test_a_deepspeed_file_for_fsdp2(zero: dict[str, Any], expected: dict[str, Any], notes: int) -> None:
    Path("ds.json").write_text(json.dumps({"zero_optimization": zero}, indent=2))
    said = _Said()
    assert _given(_config("ds.json", said, engine="fsdp2")) == {"engine": Engine.FSDP2, **expected}
    assert len(said.lines) == 1 + notes


@pytest.mark.parametrize(
    ("section", "expected", "notes"),
    [
        ({}, {"zero_stage": ZeroStage.PARAMETERS}, 1),
        ({"fsdp_reshard_after_forward": "false"}, {"zero_stage": ZeroStage.GRADIENTS}, 1),
        ({"fsdp_offload_params": "true"}, {"zero_stage": ZeroStage.PARAMETERS, **_OFFLOADED}, 1),
        (
            {"fsdp_offload_params": "true", "fsdp_reshard_after_forward": "false"},
            {"zero_stage": ZeroStage.GRADIENTS, "optimizer_offload": _CPU},
            2,
        ),
        ({"fsdp_state_dict_type": "FULL_STATE_DICT"}, {"zero_stage": ZeroStage.PARAMETERS}, 2),
        (
            {"fsdp_activation_checkpointing": "true"},
            {"zero_stage": ZeroStage.PARAMETERS, "gradient_checkpointing": True},
            1,
        ),
    ],
)
def test_a_file_of_fsdp_for_deepspeed(section: dict[str, str], expected: dict[str, Any], notes: int) -> None:
    Path("acc.yaml").write_text(_yaml({**_VERSION_2, **section}))
    said = _Said()
    given = _given(_config("acc.yaml", said, engine="deepspeed"))
    assert given == {"engine": Engine.DEEPSPEED, **expected}
    assert len(said.lines) == 1 + notes
