"""What check says of settings of FSDP: files, flags, plugins and fsdp_config, wrong and right ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rule_examples.example import FSDP2, FSDP_FILE, LANGUAGE, Example
from rule_situations import situations_of_example

from zerofit.checking.check_run import check as check_run
from zerofit.checking.engine import check
from zerofit.checking.rules import ALL_RULES

_LOOP = """\
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin

plugin = FullyShardedDataParallelPlugin({})
accelerator = Accelerator(fsdp_plugin=plugin)
"""
_TRAINER = """\
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments("out", {})
trainer = Trainer(model=None, args=arguments, train_dataset=None)
trainer.train()
"""


def _found(example: Example) -> set[str]:
    return {
        finding.rule
        for situation in situations_of_example(example)
        for finding in check(situation, rules=ALL_RULES).findings
    }


def _file(section: dict[str, Any] | None, script: str | None = None, **top: Any) -> Example:
    more = {} if section is None else {"fsdp_config": section}
    return Example(accelerate={**FSDP_FILE, **top, **more}, script=script)


def _first(**keys: Any) -> dict[str, Any]:
    return {"fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **keys}


_WRONG_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"fsdp_version": 3}, "fsdp-value-refused"),
    ({"fsdp_offload_params": "gpu"}, "fsdp-value-refused"),
    ({"fsdp_state_dict_type": "FULL_STATE"}, "fsdp-value-refused"),
    ({"fsdp_backward_prefetch": "BACKWARD"}, "fsdp-value-refused"),
    ({"fsdp_activation_checkpointing": "selective"}, "fsdp-value-refused"),
    ({"auto_wrap_policy": "TRANSFORMER_BASED"}, "fsdp-value-refused"),
    ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "fsdp2-reshard-is-boolean"),
    ({"fsdp_reshard_after_forward": "full_shard"}, "fsdp2-reshard-is-boolean"),
    ({"reshard_after_forward": "NO_SHARD"}, "fsdp2-reshard-is-boolean"),
    ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "fsdp2-ignores-sharding-strategy"),
    ({"fsdp_sharding_strategy": 2}, "fsdp2-ignores-sharding-strategy"),
    (
        {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": False},
        "fsdp2-ignores-sharding-strategy",
    ),
    (
        {"fsdp_reshard_after_forward": False, "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
        "fsdp2-sharding-strategy-unread",
    ),
    (
        {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE"},
        "fsdp2-sharding-strategy-unread",
    ),
    ({"fsdp_sharding_strategy": "NO_SHARD"}, "fsdp2-ignores-sharding-strategy"),
    ({"fsdp_state_dict_type": "local_state_dict"}, "fsdp2-has-no-local-state-dict"),
    ({"fsdp_sync_module_states": False}, "fsdp-efficient-loading-needs-sync"),
    ({"fsdp_activation_checkpointing_offload": "true"}, "fsdp-checkpoint-offload-needs-checkpointing"),
    ({"fsdp_auto_wrap_policy": "no_wrap"}, "fsdp-wraps-no-block"),
    ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 0}, "fsdp-wraps-no-block"),
    ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "fsdp2-shards-no-module-lists"),
    (
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000},
        "fsdp2-shards-no-module-lists",
    ),
    (
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1e8},
        "fsdp-min-num-params-is-whole",
    ),
    (
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "2e7"},
        "fsdp-min-num-params-is-whole",
    ),
    (
        {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer, LlamaMLP"},
        "fsdp-wrap-classes-are-one-text",
    ),
    ({"fsdp_transformer_layer_cls_to_wrap": ["GPT2Block"]}, "fsdp-wrap-classes-are-one-text"),
    ({"fsdp_transformer_layer_cls_to_wrap": "Qwen2DecoderLayers"}, "fsdp-wrap-class-unknown"),
    ({"fsdp_transformer_layer_cls_to_wrap": "MistralDecodeLayer"}, "fsdp-wrap-class-unknown"),
]


@pytest.mark.parametrize(("keys", "rule"), _WRONG_KEYS, ids=str)
def test_a_key_of_fsdp_2_is_refused_or_lost(keys: dict[str, Any], rule: str) -> None:
    assert _found(_file({**FSDP2, **keys})) == {rule}


_RIGHT_KEYS: list[dict[str, Any]] = [
    {"fsdp_reshard_after_forward": "true", "fsdp_backward_prefetch": "BACKWARD_PRE"},
    {"fsdp_use_orig_params": True, "fsdp_sync_module_states": True, "fsdp_forward_prefetch": False},
    {"fsdp_state_dict_type": "full_state_dict", "fsdp_offload_params": "yes"},
    {"fsdp_cpu_ram_efficient_loading": False, "fsdp_sync_module_states": False},
    {"fsdp_sync_module_states": "false"},
    {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
    {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,MistralDecoderLayer"},
    {"fsdp_transformer_layer_cls_to_wrap": "MyOwnBlock"},
    {"fsdp_min_num_params": "1e8"},
    {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
]


@pytest.mark.parametrize("keys", _RIGHT_KEYS, ids=str)
def test_a_key_that_counts_or_is_harmless_is_no_finding(keys: dict[str, Any]) -> None:
    assert _found(_file({**FSDP2, **keys})) == set()


@pytest.mark.parametrize(
    ("section", "rules"),
    [
        (_first(fsdp_reshard_after_forward="SHARD_GRAD_OP"), {"fsdp1-ignores-reshard-after-forward"}),
        (_first(fsdp_reshard_after_forward="HYBRID_SHARD"), {"fsdp1-ignores-reshard-after-forward"}),
        (
            _first(fsdp_reshard_after_forward="SHARD_GRAD_OP", fsdp_sharding_strategy="HYBRID_SHARD"),
            {"fsdp1-ignores-reshard-after-forward"},
        ),
        (_first(fsdp_reshard_after_forward=False), {"fsdp1-ignores-reshard-after-forward"}),
        (_first(fsdp_sharding_strategy="FULL_SHARDED"), {"fsdp-value-refused"}),
        (
            _first(fsdp_activation_checkpointing=True, fsdp_activation_checkpointing_offload=True),
            {"fsdp-checkpoint-offload-needs-checkpointing"},
        ),
        (_first(fsdp_reshard_after_forward="FULL_SHARD"), set()),
        (_first(fsdp_sharding_strategy=1, fsdp_state_dict_type="LOCAL_STATE_DICT"), set()),
        (_first(fsdp_sharding_strategy="SHARD_GRAD_OP", fsdp_forward_prefetch=True), set()),
        (_first(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=2000), set()),
    ],
)
def test_version_1_has_keys_of_its_own(section: dict[str, Any], rules: set[str]) -> None:
    assert _found(_file(section)) == rules


def test_a_file_without_its_section_shards_no_block() -> None:
    assert _found(_file(None)) == {"fsdp-wraps-no-block"}


def test_settings_without_their_indentation_are_checked_as_meant() -> None:
    """accelerate refuses the file, whose settings are not missing. As on a page of transformers."""
    meant = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    assert _found(_file(None, **meant)) == {"accelerate-unknown-key"}
    wrong = _found(_file(None, fsdp_version=2, **{**meant, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}))
    assert wrong == {"accelerate-unknown-key", "fsdp2-has-no-local-state-dict"}


@pytest.mark.parametrize("words", [("--fsdp",), ("--fsdp", "full_shard auto_wrap offload")])
def test_training_arguments_with_fsdp_leave_no_engine_unknown(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(_PARSED)
    line = ("torchrun", "--nproc_per_node=2", "train.py", "--output_dir", "out")
    report = check_run(*line, *words)
    assert "the engine" not in str(report)
    assert "the engine" in str(check_run(*line))


_PARSED = """\
from transformers import HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model=None, args=arguments, train_dataset=None).train()
"""


def test_a_field_of_training_arguments_before_the_script_belongs_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(_PARSED)
    line = ("accelerate", "launch", "--use_fsdp", "--fsdp_config=fsdp.json", "train.py")
    fixes = [found.fix for found in check_run(*line).findings if found.rule == "launch-unknown-flag"]
    assert fixes == ["write it after the script: fsdp_config is a field of TrainingArguments"]


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        ("--fsdp_version 2", {"fsdp-settings-without-fsdp"}),
        ("--multi_gpu --fsdp_sharding_strategy FULL_SHARD", {"fsdp-settings-without-fsdp"}),
        ("--use_fsdp --fsdp_version 2", {"fsdp-wraps-no-block"}),
        (
            "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
            "--fsdp_reshard_after_forward FULL_SHARD",
            {"fsdp2-reshard-is-boolean"},
        ),
        (
            "--use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_sharding_strategy FULL",
            {"launch-flag-value"},
        ),
        (
            "--use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_version 2 "
            "--fsdp_offload_params true --fsdp_state_dict_type FULL_STATE_DICT",
            set(),
        ),
        ("--use_fsdp --fsdp_auto_wrap_policy $POLICY --fsdp_version 2", set()),
    ],
)
def test_flags_count_as_keys_do(flags: str, rules: set[str]) -> None:
    assert _found(Example(command=f"accelerate launch {flags}", script=LANGUAGE)) == rules


@pytest.mark.parametrize(
    ("flag", "rules"),
    [("", {"fsdp2-has-no-local-state-dict"}), ("--fsdp_state_dict_type FULL_STATE_DICT", set())],
)
def test_a_flag_overrides_its_key(flag: str, rules: set[str]) -> None:
    file = {**FSDP_FILE, "fsdp_config": {**FSDP2, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}}
    launch = f"accelerate launch --config_file accelerate.yaml {flag}".strip()
    assert _found(Example(accelerate=file, command=launch, script=LANGUAGE)) == rules


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [
        (
            'fsdp_version=2, auto_wrap_policy="transformer_based_wrap", forward_prefetch=False',
            {"fsdp2-has-no-forward-prefetch"},
        ),
        ("fsdp_version=2", {"fsdp-wraps-no-block"}),
        (
            'fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward="full_shard"',
            {"fsdp2-reshard-is-boolean"},
        ),
        ('fsdp_version=2, auto_wrap_policy="transformers"', {"fsdp-value-refused"}),
        (
            'fsdp_version=2, auto_wrap_policy="transformer_based_wrap", sharding_strategy="SHARD_GRAD_OP"',
            {"fsdp2-ignores-sharding-strategy"},
        ),
        ('fsdp_version=2, auto_wrap_policy="transformer_based_wrap"', set()),
        ("fsdp_version=2, auto_wrap_policy=my_policy", set()),
        ("**settings", set()),
    ],
)
def test_a_plugin_in_the_script_counts_too(arguments: str, rules: set[str]) -> None:
    assert _found(Example(script=_LOOP.format(arguments), command="torchrun --nproc_per_node 2")) == rules


_NO_DATA = "evaluation-needs-dataset"  # the script gives none
_ONLY_MODELS = 'save_only_model=True, fsdp=True, eval_strategy="steps", eval_steps=2, save_steps=2'
_CONFIGS = [
    ('fsdp_config={"version": 2}', {"fsdp-config-without-fsdp"}),
    ('fsdp=False, fsdp_config={"version": 2}', {"fsdp-config-without-fsdp"}),
    ('fsdp="", fsdp_config={"cpu_offload": True}', {"fsdp-config-without-fsdp"}),
    ('fsdp=True, fsdp_config={"offload_params": True}', {"fsdp-config-key-unknown"}),
    ('fsdp=True, fsdp_config={"fsdp_transformer_layer_cls": "GPT2Block"}', {"fsdp-config-key-unknown"}),
    ('fsdp=True, fsdp_config={"fsdp_sharding_strategy": "HYBRID_SHARD"}', {"fsdp-config-key-unknown"}),
    ('fsdp=True, fsdp_config={"reshard_after_forward": "SHARD_GRAD_OP"}', {"fsdp2-reshard-is-boolean"}),
    ('fsdp=True, fsdp_config={"auto_wrap_policy": "transformer_based_wrap"}', {"fsdp-value-refused"}),
    ('fsdp=True, fsdp_config={"state_dict_type": "LOCAL_STATE_DICT"}', {"fsdp2-has-no-local-state-dict"}),
    ('fsdp=True, fsdp_config={"auto_wrap_policy": "NO_WRAP"}', {"fsdp-wraps-no-block"}),
    ('fsdp=True, fsdp_config={"auto_wrap_policy": "SIZE_BASED_WRAP"}', {"fsdp-wraps-no-block"}),
    ('fsdp="full_shard, auto_wrap"', {"fsdp-word-refused"}),
    ('fsdp="hybrid_shard auto_wrap"', {"fsdp-word-refused"}),
    ('fsdp=["full_shard", "autowrap"]', {"fsdp-word-refused"}),
    ('fsdp=True, optim="adamw_8bit"', {"fsdp2-optimizer-takes-no-dtensors"}),
    ('fsdp=True, optim="adafactor"', {"fsdp2-optimizer-takes-no-dtensors"}),
    ('fsdp=True, optim="paged_adamw_8bit"', {"fsdp2-optimizer-takes-no-dtensors"}),
    (
        'fsdp=True, activation_checkpointing=True, fsdp_config={"activation_checkpointing": "true"}',
        {"fsdp-checkpoints-twice"},
    ),
    (
        'fsdp=True, save_only_model=True, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"}',
        {"fsdp-sharded-save-only-model"},
    ),
    (f"{_ONLY_MODELS}, load_best_model_at_end=True", {_NO_DATA, "fsdp-best-model-needs-states"}),
    (f"{_ONLY_MODELS}, load_best_model_at_end=False", {_NO_DATA}),
    (f"{_ONLY_MODELS.replace('True', 'False', 1)}, load_best_model_at_end=True", {_NO_DATA}),
    ("fsdp=True", set()),
    ('fsdp="full_shard auto_wrap offload"', set()),
    ('fsdp=["shard_grad_op", "auto_wrap"], fsdp_config={"version": 2}', set()),
    ('fsdp="hybrid_shard auto_wrap", fsdp_config={"version": 1}', set()),
    ('fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "LlamaMLP"]}', set()),
    ('fsdp=True, fsdp_config={"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": "true"}', set()),
    ('fsdp=True, fsdp_config={"xla": True, "xla_fsdp_settings": {"compute_dtype": "bfloat16"}}', set()),
    ("fsdp=args.fsdp, fsdp_config=args.fsdp_config", set()),
    ('fsdp=True, fsdp_config=config, optim="adamw_torch_fused"', set()),
    ('fsdp=True, optim="adamw_8bit", fsdp_config={"version": 1, "use_orig_params": True}', set()),
]


@pytest.mark.parametrize(("arguments", "rules"), _CONFIGS)
def test_fsdp_in_training_arguments(arguments: str, rules: set[str]) -> None:
    script = _TRAINER.format(arguments)
    assert _found(Example(script=script, command="torchrun --nproc_per_node 2")) == rules


@pytest.mark.parametrize(
    ("model", "block", "rules"),
    [
        ("Qwen/Qwen2-7B", "Qwen2DecoderLayer", set()),
        ("Qwen/Qwen2-7B", "LlamaDecoderLayer", {"fsdp-wrap-class-unknown"}),
        ("mistralai/Mistral-7B-v0.1", "LlamaDecoderLayer", {"fsdp-wrap-class-unknown"}),
        ("google-bert/bert-base-uncased", "GPT2Block", {"fsdp-wrap-class-unknown"}),
        ("gpt2", "GPT2Block", set()),
        ("somebody/a-model", "LlamaDecoderLayer", set()),
        ("meta-llama/Meta-Llama-3-8B", "LlamaDecoderLayer,LlamaMLP", set()),
        ("meta-llama/Meta-Llama-3-8B", "LlamaDecoderLayer,Qwen2MLP", {"fsdp-wrap-class-unknown"}),
    ],
)
def test_the_class_to_wrap_is_of_the_model(model: str, block: str, rules: set[str]) -> None:
    script = LANGUAGE.replace(".from_config(config)", f'.from_pretrained("{model}")')
    assert _found(_file({**FSDP2, "fsdp_transformer_layer_cls_to_wrap": block}, script)) == rules


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ('{"version": 2, "sharding_strategy": "SHARD_GRAD_OP"}', ["fsdp-config-key-unknown"]),
        ('{"fsdp_auto_wrap_policy": "TRANSFORMER_WRAP"}', ["fsdp-value-refused"]),
        ('{"reshard_after_forward": "FULL_SHARD"}', ["fsdp2-reshard-is-boolean"]),
        ('{"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_offload": true}', []),
        ('{"fsdp_version": 2, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}', []),
    ],
)
def test_the_file_of_fsdp_config_alone(
    text: str, rules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fsdp.json").write_text(text)
    assert [finding.rule for finding in check_run("fsdp.json").findings] == rules


def test_a_line_names_the_file_of_fsdp_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fsdp.json").write_text('{"sharding_strategy": "HYBRID_SHARD"}')
    Path("train.py").write_text(
        "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
        "(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
        "Trainer(model=None, args=arguments, train_dataset=None).train()\n"
    )
    line = "torchrun --nproc_per_node 2 train.py --output_dir out --fsdp_config fsdp.json --fsdp"
    (finding,) = check_run(*f"{line} true".split()).findings
    assert (finding.rule, str(finding.place)) == ("fsdp-config-key-unknown", "fsdp.json:1")
    (finding,) = check_run(*line.split()).findings
    assert finding.rule == "fsdp-config-key-unknown"
    (finding,) = check_run(*line.removesuffix(" --fsdp").split()).findings
    assert finding.rule == "fsdp-config-without-fsdp"


def test_ms_swift_has_words_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("swift sft --model Qwen/Qwen2-7B --fsdp fsdp2 --output_dir out\n")
    assert [finding.rule for finding in check_run("run.sh").findings] == []
    Path("run.sh").write_text("llamafactory-cli train --stage sft --fsdp fsdp2 --output_dir out\n")
    assert [finding.rule for finding in check_run("run.sh").findings] == ["fsdp-word-refused"]


_SHIPPED_ALIKE = {
    "first.yaml": """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: FULL_SHARD
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 1
num_processes: 8
""",
    "second.yaml": """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
""",
    "offload.yaml": """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: MistralDecoderLayer
  fsdp_version: 2
mixed_precision: 'no'
num_machines: 2
num_processes: 16
""",
    "copies.yaml": """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_version: 2
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
""",
    "zero.yaml": """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  zero_stage: 2
distributed_type: DEEPSPEED
fsdp_config: {}
mixed_precision: bf16
num_machines: 1
num_processes: 8
""",
    "fsdp.json": '{"min_num_params": 0, "backward_prefetch": "backward_pre", "use_orig_params": "true", '
    '"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"], "limit_all_gathers": true}',
}


@pytest.mark.parametrize("name", _SHIPPED_ALIKE)
def test_a_file_as_training_libraries_ship_has_no_finding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(_SHIPPED_ALIKE[name])
    assert check_run(name).findings == ()
