"""FSDP 2 with quantized weights, and with checkpoints of blocks that nothing names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from rule_examples.example import FSDP2, FSDP_FILE, LANGUAGE, Example
from rule_situations import situations_of_example

from zerofit.checking.check_run import check as check_run
from zerofit.checking.engine import check
from zerofit.checking.rules import ALL_RULES

_BLOCKS, _WHOLE, _EIGHT = (
    "fsdp-checkpointing-needs-blocks",
    "fsdp2-loads-quantized-whole",
    "fsdp2-shards-no-8-bit-weights",
)
_ARGUMENTS = """\
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

args = TrainingArguments("out", fsdp=True, fsdp_config={})
model = AutoModelForCausalLM.from_pretrained("m"{})
Trainer(model=model, args=args, train_dataset=[]).train()
"""
_NF4 = ", quantization_config=BitsAndBytesConfig(load_in_4bit=True)"
_INT8 = ", quantization_config=BitsAndBytesConfig(load_in_8bit=True)"
_PLAIN = LANGUAGE.replace("import AutoModelForCausalLM", "import AutoModelForCausalLM, BitsAndBytesConfig")
_MADE = "AutoModelForCausalLM.from_config(config)"


def _found(example: Example, rule: str) -> list[str]:
    chosen = [declared for declared in ALL_RULES if declared.id == rule]
    verdicts = [check(situation, rules=chosen) for situation in situations_of_example(example)]
    return [finding.found for verdict in verdicts for finding in verdict.findings]


def _launched(script: str = LANGUAGE, /, arguments: str = "", **section: Any) -> Example:
    keys = {f"fsdp_{name}": value for name, value in section.items()}
    file = {**FSDP_FILE, "fsdp_config": {**FSDP2, **keys}}
    return Example(accelerate=file, script=script, arguments=arguments, command=_LAUNCH)


_LAUNCH = "accelerate launch --config_file accelerate.yaml"


def _of_trainer(config: dict[str, Any], more: str = "") -> Example:
    return Example(script=_ARGUMENTS.format(config, more), command="torchrun --nproc_per_node 2")


@pytest.mark.parametrize(
    "example",
    [
        _launched(auto_wrap_policy="NO_WRAP", activation_checkpointing=True),
        _launched(auto_wrap_policy="no_wrap", activation_checkpointing="true"),
        _launched(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=0, activation_checkpointing=True),
        Example(
            accelerate={
                **FSDP_FILE,
                "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True},
            }
        ),
        Example(command="accelerate launch --use_fsdp --fsdp_version 2 --fsdp_activation_checkpointing true"),
        _of_trainer({"activation_checkpointing": True, "auto_wrap_policy": "NO_WRAP"}),
    ],
)
def test_checkpoints_need_the_blocks_that_a_policy_names(example: Example) -> None:
    assert len(_found(example, _BLOCKS)) == 1
    assert _found(example, "fsdp-wraps-no-block") == []


@pytest.mark.parametrize(
    "example",
    [
        _launched(activation_checkpointing=True),
        _launched(auto_wrap_policy="NO_WRAP", activation_checkpointing=False),
        _launched(auto_wrap_policy="NO_WRAP"),
        _launched(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1000, activation_checkpointing=True),
        _launched(version=1, auto_wrap_policy="NO_WRAP", activation_checkpointing=True),  # wraps all modules
        _of_trainer({"activation_checkpointing": True}),  # TRANSFORMER_BASED_WRAP is Trainer's default
    ],
)
def test_checkpoints_of_named_blocks(example: Example) -> None:
    assert _found(example, _BLOCKS) == []


def _loading(script: str) -> str:
    return script.replace(_MADE, f'AutoModelForCausalLM.from_pretrained("m"{_NF4})')


@pytest.mark.parametrize(
    "example",
    [
        _launched(_loading(_PLAIN), cpu_ram_efficient_loading=True),
        _launched(_loading(_PLAIN), cpu_ram_efficient_loading="true"),
        _of_trainer({"cpu_ram_efficient_loading": True}, _NF4),
        _launched(arguments="--load_in_4bit --bf16", cpu_ram_efficient_loading=True),
        _launched(arguments="--quantization_bit 4", cpu_ram_efficient_loading=True),
        _launched(arguments="--use_qlora=true", cpu_ram_efficient_loading=True),
    ],
)
def test_efficient_loading_has_no_effect_on_4_bit_weights(example: Example) -> None:
    (found,) = _found(example, _WHOLE)
    assert "cpu_ram_efficient_loading" in found


@pytest.mark.parametrize(
    "example",
    [
        _launched(_loading(_PLAIN)),
        _launched(_loading(_PLAIN), cpu_ram_efficient_loading=False),
        _launched(cpu_ram_efficient_loading=True),
        _launched(arguments="--load_in_4bit false", cpu_ram_efficient_loading=True),
        _launched(_loading(_PLAIN), version=1, cpu_ram_efficient_loading=True),
        _of_trainer({"cpu_ram_efficient_loading": True}),
    ],
)
def test_loading_that_has_an_effect(example: Example) -> None:
    assert _found(example, _WHOLE) == []


_LOADING = "cpu_ram_efficient_loading"


@pytest.mark.parametrize(
    ("more", "is_found"),
    [
        ({"load_in_4bit": True, "fsdp_version": 2}, True),
        ({"load_in_4bit": True, "fsdp_config": {f"fsdp_{_LOADING}": True, "fsdp_version": 2}}, True),
        ({"load_in_4bit": True, "fsdp_config": {_LOADING: False, "fsdp_version": 2}}, False),
        ({"load_in_4bit": False, "fsdp_version": 2}, False),
        ({"load_in_4bit": True}, False),  # version 1
        ({"load_in_4bit": True, "fsdp_version": 2, "fsdp_config": None}, False),
    ],
)
def test_recipes_of_axolotl(more: dict[str, Any], is_found: bool, tmp_path: Path) -> None:
    recipe = {
        "base_model": "m",
        "adapter": "qlora",
        "micro_batch_size": 1,
        "learning_rate": 1e-4,
        "fsdp_config": {"cpu_ram_efficient_loading": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        **more,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert (_WHOLE in [finding.rule for finding in check_run(path).findings]) is is_found


@pytest.mark.parametrize(
    ("example", "is_found"),
    [
        (_of_trainer({"version": 2}, _INT8), True),
        (_launched(arguments="--load_in_8bit"), True),
        (_launched(arguments="--quantization_bit 8"), True),
        (_launched(arguments="--bits 8"), True),
        (_launched(_PLAIN.replace(_MADE, f'AutoModelForCausalLM.from_pretrained("m"{_INT8})')), True),
        (_of_trainer({"version": 2}, _NF4), False),
        (_launched(arguments="--bits 16"), False),
        (_launched(arguments="--load_in_8bit", version=1), False),
        (Example(command="torchrun --nproc_per_node 2", arguments="--load_in_8bit"), False),
    ],
)
def test_8_bit_weights_are_not_sharded(example: Example, is_found: bool) -> None:
    assert bool(_found(example, _EIGHT)) is is_found
