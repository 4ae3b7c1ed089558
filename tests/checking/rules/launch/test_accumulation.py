"""Accumulation in a script with Accelerator, beside a DeepSpeed file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Finding
from zerofit.configs.document import SetValue

Check = Callable[..., list[Finding]]
_SCRIPT = """\
from accelerate import Accelerator

accelerator = Accelerator({accelerator})
model, optimizer, data = accelerator.prepare(make_model(), make_optimizer(), make_data())
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).loss)
        optimizer.step()
        optimizer.zero_grad()
"""
_ZERO2 = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}


def _layers(accelerator: str = "", **deepspeed: Any) -> dict[str, Any]:
    return {"script": _SCRIPT.format(accelerator=accelerator), "deepspeed": {**_ZERO2, **deepspeed}}


def test_missing_accumulation_is_said_whole(check_example: Check) -> None:
    layers = _layers("gradient_accumulation_steps=4")
    (finding,) = check_example("accumulation-not-in-deepspeed-file", **layers)
    assert finding.as_text() == (
        "warning[accumulation-not-in-deepspeed-file]: DeepSpeed does not accumulate what Accelerator() asks "
        "for (likely)\n"
        "  found: Accelerator(gradient_accumulation_steps=4) with no gradient_accumulation_steps in "
        "ds_config.json   (train.py:3)\n"
        "  why:   a file without gradient_accumulation_steps means 1, and accelerate takes the file's value\n"
        '  fix:   write gradient_accumulation_steps: "auto" in the DeepSpeed file\n'
        "  see:   https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py"
    )
    edit = SetValue(document="ds_config.json", path=("gradient_accumulation_steps",), value="auto")
    assert finding.edits == (edit,)


_STEPS = "gradient_accumulation_steps"
_CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("accumulation-not-in-deepspeed-file", _layers(f"{_STEPS}=1"), []),
    ("accumulation-not-in-deepspeed-file", _layers(f"{_STEPS}=args.steps"), []),
    ("accumulation-not-in-deepspeed-file", _layers(f"{_STEPS}=4", **{_STEPS: "auto"}), []),
    (
        "accumulation-differs",
        _layers(f"{_STEPS}=4", **{_STEPS: 8}),
        [f"Accelerator({_STEPS}=4) with {_STEPS}=8 in ds_config.json"],
    ),
    ("accumulation-differs", _layers(f"{_STEPS}=4", **{_STEPS: 4}), []),
    ("accumulation-differs", _layers(**{_STEPS: 8}), []),
]


@pytest.mark.parametrize(("rule", "layers", "found"), _CASES)
def test_what_is_found(check_example: Check, rule: str, layers: dict[str, Any], found: list[str]) -> None:
    assert [finding.found for finding in check_example(rule, **layers)] == found
