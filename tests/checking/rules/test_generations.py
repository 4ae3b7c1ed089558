"""TRL's batches of whole groups: ranks of the launch line, TRL's defaults, silence where one is unknown."""

from __future__ import annotations

import pytest
from rule_examples.example import Example
from rule_situations import situation_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules.trainer import generations
from zerofit.core.setting import Confidence

_SURE, _LIKELY = Confidence.CERTAIN, Confidence.LIKELY


def _grpo(keywords: str, kind: str = "GRPO") -> str:
    return f"""\
from trl import {kind}Config, {kind}Trainer

settings = {kind}Config(output_dir="o", {keywords})
trainer = {kind}Trainer(model="m", args=settings, reward_funcs=reward, train_dataset=rows)
trainer.train()
"""


_PARSED = """\
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser

settings, model = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
GRPOTrainer(model.model_name_or_path, args=settings, reward_funcs=reward, train_dataset=rows).train()
"""
_MULTI = "accelerate launch --multi_gpu --num_processes"


@pytest.mark.parametrize(
    ("script", "command", "arguments", "expected"),
    [
        (_grpo("per_device_train_batch_size=3, num_generations=4"), "python", "", [_SURE]),
        (_grpo("per_device_train_batch_size=1"), f"{_MULTI} 4", "", [_SURE]),
        (_grpo("per_device_train_batch_size=4, steps_per_generation=3"), "python", "", [_SURE]),
        (_grpo("generation_batch_size=20, num_generations=8"), f"{_MULTI} 2", "", [_SURE]),
        (_grpo("num_generations=7"), "torchrun --nproc_per_node 6", "", [_SURE]),
        (_grpo("per_device_train_batch_size=5", "RLOO"), "python", "", [_SURE]),
        (_grpo("num_generations=1"), f"{_MULTI} 4", "", [_SURE]),
        (_grpo("eval_strategy='steps', per_device_eval_batch_size=1"), f"{_MULTI} 2", "", [_SURE]),
        (_grpo("eval_strategy='epoch', num_generations_eval=3"), f"{_MULTI} 2", "", [_SURE]),
        (_PARSED, "python", "--per_device_train_batch_size 2 --num_generations 4", [_LIKELY]),
        (_grpo("per_device_train_batch_size=1"), f"{_MULTI} 8", "", []),
        (_grpo("per_device_train_batch_size=2, gradient_accumulation_steps=4"), "python", "", []),
        (_grpo("per_device_train_batch_size=4", "RLOO"), "python", "", []),
        (_grpo("per_device_train_batch_size=5", "RLOO"), f"{_MULTI} 2", "", []),
        (_grpo("per_device_train_batch_size=batch, num_generations=4"), "python", "", []),
        (_grpo("per_device_train_batch_size=3, num_generations=4, **more"), "python", "", []),
        (_grpo("per_device_train_batch_size=3, rloo_k=4", "RLOO"), "python", "", []),
        (_grpo("per_device_train_batch_size=1"), "accelerate launch", "", []),
        (_grpo("per_device_train_batch_size=1"), None, "", []),
        (_grpo("per_device_eval_batch_size=1"), "python", "", []),
        (_grpo("per_device_train_batch_size=1", "DPO"), "python", "", []),
        (_PARSED, "python", "--config grpo.yaml --per_device_train_batch_size 2 --num_generations 4", []),
        (_PARSED, "python", "--per_device_train_batch_size 2 --num_generations $GROUP", []),
    ],
)  # fmt: skip
def test_groups_of_generations(
    script: str, command: str | None, arguments: str, expected: list[Confidence]
) -> None:
    example = Example(script=script, command=command, arguments=arguments)
    findings = check(situation_of_example(example), rules=generations.RULES).findings
    assert [finding.confidence for finding in findings] == expected
