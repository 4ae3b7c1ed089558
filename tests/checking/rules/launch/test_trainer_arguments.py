"""TrainingArguments and the DeepSpeed file: what Trainer refuses, and what it silently drops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Finding
from zerofit.configs.document import SetValue
from zerofit.core.command import Route

Check = Callable[..., list[Finding]]
_AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}


def _layers(arguments: str, deepspeed: dict[str, Any]) -> dict[str, Any]:
    return {"route": Route.TRAINER, "deepspeed": {**_AUTO, **deepspeed}, "arguments": arguments}


def test_a_mismatch_is_said_whole(check_example: Check) -> None:
    layers = _layers("--learning_rate 2e-5", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})
    (finding,) = check_example("trainer-values-differ", **layers)
    assert finding.as_text() == (
        "error[trainer-values-differ]: Trainer refuses a DeepSpeed file that says otherwise than its "
        "arguments\n"
        "  found: optimizer.params.lr=0.0001 with --learning_rate 2e-5   (ds_config.json:7)\n"
        '  why:   Trainer compares the two as they stand, 8 and "8" being different, and fills in "auto" '
        "alone\n"
        '  fix:   write optimizer.params.lr: "auto"\n'
        "  see:   https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/"
        "deepspeed.py"
    )
    assert finding.edits == (
        SetValue(document="ds_config.json", path=("optimizer", "params", "lr"), value="auto"),
    )


_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}}
_FOUND: list[tuple[str, str, dict[str, Any], list[str]]] = [
    (
        "trainer-values-differ",
        "--per_device_train_batch_size 8",
        {"train_micro_batch_size_per_gpu": "8"},
        ["train_micro_batch_size_per_gpu=8 with --per_device_train_batch_size 8"],
    ),
    ("trainer-values-differ", "--bf16", {"bf16": {"enabled": False}}, ["bf16.enabled=false with --bf16"]),
    ("trainer-values-differ", "--bf16 True", {"bf16": {"enabled": True}}, []),
    ("trainer-values-differ", "--bf16_full_eval --bf16 no", {"bf16": {"enabled": True}}, []),
    ("trainer-values-differ", "--max_grad_norm 1", {"gradient_clipping": 1.0}, []),
    (
        "trainer-values-differ",
        "--per_device_train_batch_size 8 --auto_find_batch_size",
        {"train_micro_batch_size_per_gpu": 2},
        [],
    ),
    (
        "trainer-values-differ",
        "--adam_beta1 0.9 --adam_beta2 0.999",
        {"optimizer": _ADAMW},
        ["optimizer.params.betas=[0.9, 0.95] with --adam_beta1 0.9 and --adam_beta2 0.999"],
    ),
    ("trainer-values-differ", "--adam_beta2 0.95", {"optimizer": _ADAMW}, []),  # adam_beta1 is not known
    (
        "trainer-values-differ",
        "--warmup_steps 10",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}},
        ["scheduler.params.warmup_num_steps=100 with --warmup_steps 10"],
    ),
    (
        "trainer-values-differ",
        "--warmup_steps 0.1",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}},
        [],
    ),
    ("trainer-values-differ", "--adam_beta1 $B1 --adam_beta2 $B2", {"optimizer": _ADAMW}, []),
    ("trainer-clipping-not-in-file", "--max_grad_norm 1.0", {}, []),
    ("trainer-argument-overridden", "--optim $OPTIM", {"optimizer": _ADAMW}, []),
    (
        "trainer-argument-overridden",
        "--optim $OPTIM --lr_scheduler_type cosine",
        {"optimizer": _ADAMW, "scheduler": {"type": "WarmupLR", "params": {}}},
        ["--lr_scheduler_type cosine with scheduler.type=WarmupLR"],
    ),
    (
        "trainer-argument-overridden",
        "--optim adamw_torch --lr_scheduler_type cosine",
        {"optimizer": _ADAMW, "scheduler": {"type": "WarmupLR", "params": {}}},
        ["--lr_scheduler_type cosine with scheduler.type=WarmupLR"],
    ),
    (
        "trainer-argument-overridden",
        "--lr_scheduler_type cosine",
        {"scheduler": {"type": "WarmupLR"}},
        ["--lr_scheduler_type cosine with scheduler.type=WarmupLR"],
    ),
    ("trainer-argument-overridden", "--optim adamw_torch", {"optimizer": _ADAMW}, []),
    (
        "trainer-argument-overridden",
        "--lr_scheduler_type linear",
        {"scheduler": {"type": "WarmupDecayLR"}},
        [],
    ),
    ("trainer-takes-one-half-precision", "--bf16 --fp16 false", {}, []),
    (
        "trainer-takes-one-half-precision",
        "--bf16_full_eval --fp16-full-eval",
        {},
        ["--bf16_full_eval with --fp16-full-eval"],
    ),
    ("trainer-unknown-optimizer", "--optim $OPTIM", {}, []),
    ("trainer-unknown-optimizer", "--optim adamw_8bits", {}, ["--optim adamw_8bits"]),
    ("training-argument-unknown", "--my_own_argument 3 --gradient_checkpointing", {}, []),
    ("training-argument-unknown", "--warmup_ratio 0.1", {}, ["--warmup_ratio 0.1"]),
]


@pytest.mark.parametrize(("rule", "arguments", "deepspeed", "found"), _FOUND)
def test_what_is_found(
    check_example: Check, rule: str, arguments: str, deepspeed: dict[str, Any], found: list[str]
) -> None:
    findings = check_example(rule, **_layers(arguments, deepspeed))
    assert [finding.found for finding in findings] == found


def test_a_removed_argument_is_likely_only(check_example: Check) -> None:
    (finding,) = check_example("training-argument-unknown", **_layers("--evaluation_strategy steps", {}))
    assert (finding.severity, finding.fix) == ("warning", "write eval_strategy")


def test_arguments_of_a_script_without_trainer_are_its_own(check_example: Check) -> None:
    layers = _layers("--learning_rate 1 --optim adamw_hf --warmup_ratio 0.1", {"optimizer": _ADAMW})
    layers["route"] = Route.ACCELERATE
    for rule in ("trainer-values-differ", "trainer-unknown-optimizer", "training-argument-unknown"):
        assert check_example(rule, **layers) == []
