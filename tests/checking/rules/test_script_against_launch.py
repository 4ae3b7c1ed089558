"""What a script gives its Accelerator against the launch: accumulation steps and mixed precision."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rule_examples.example import LAUNCH_FILE, Example, zero
from rule_situations import situations_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules import ALL_RULES

_STEPS = (
    "accelerator-not-told-accumulation",
    "accumulation-differs",
    "accumulation-differs-in-accelerate-file",
)
_PRECISION = ("mixed-precision-set-by-script",)
_SCRIPT = """\
import argparse
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
{options}
args = parser.parse_args()
accelerator = Accelerator({given})
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
loader = DataLoader(torch.randn(32, 8), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
_OPTION = 'parser.add_argument("--gradient_accumulation_steps", type=int, default={})'
_SHORT = 'parser.add_argument("--grad_accum", type=int, default=1)'


def _found(example: Example, rules: tuple[str, ...]) -> list[str]:
    chosen = [rule for rule in ALL_RULES if rule.id in rules]
    return [
        f"{finding.rule}: {finding.found}"
        for situation in situations_of_example(example)
        for finding in check(situation, rules=chosen).findings
    ]


def _script(options: str = "", given: str = "") -> str:
    return _SCRIPT.format(options=options, given=given)


def _launched(**section: Any) -> dict[str, Any]:
    return {**LAUNCH_FILE, "num_processes": 2, "deepspeed_config": {"zero_stage": 2, **section}}


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (_script(_OPTION.format(1)), "gradient_accumulation_steps"),
        (_script(_OPTION.format(1), 'mixed_precision="bf16"'), "gradient_accumulation_steps"),
        (_script(_OPTION.format(1), 'log_with="wandb", project_dir="out"'), "gradient_accumulation_steps"),
        (_script(_SHORT), "grad_accum"),
        (_script('parser.add_argument("-a", "--grad-accum-steps", type=int, default=1)'), "grad_accum_steps"),
    ],
)
def test_a_script_has_an_argument_for_steps_that_its_accelerator_never_gets(script: str, name: str) -> None:
    (found,) = _found(Example(script=script), _STEPS)
    assert found.startswith("accelerator-not-told-accumulation: Accelerator(")
    assert found.endswith(f" without the script's own --{name}")
    told = script.replace(
        "accelerator = Accelerator(", "accelerator = Accelerator(gradient_accumulation_steps=2, "
    )
    assert _found(Example(script=told), _STEPS) == []


def _told(value: str) -> str:
    return _script(_OPTION.format(value), "gradient_accumulation_steps=args.gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("script", "arguments", "shown"),
    [
        (_told("1"), "", "Accelerator(gradient_accumulation_steps=1)"),
        (_told("1"), "--lr 1e-4", "Accelerator(gradient_accumulation_steps=1)"),
        (_told("2"), "", "Accelerator(gradient_accumulation_steps=2)"),
        (_told("1"), "--gradient_accumulation_steps 2", "Accelerator(gradient_accumulation_steps=2)"),
        (_script(_OPTION.format(1)), "", "--gradient_accumulation_steps 1 by default"),
        (_script(_OPTION.format(1)), "--gradient_accumulation_steps 8", "--gradient_accumulation_steps 8"),
        (_script(_SHORT), "--grad_accum 3", "--grad_accum 3"),
        (_script(given="gradient_accumulation_steps=3"), "", "Accelerator(gradient_accumulation_steps=3)"),
    ],
)
def test_a_file_says_other_steps_than_the_script_counts(script: str, arguments: str, shown: str) -> None:
    launched = Example(
        accelerate=_launched(gradient_accumulation_steps=4),
        script=script,
        arguments=arguments,
        command=_LAUNCH,
    )
    (found,) = _found(launched, _STEPS)
    assert found.startswith(f"accumulation-differs-in-accelerate-file: {shown} with ")
    assert found.endswith("gradient_accumulation_steps=4")
    deepspeed = {**zero(2), "gradient_accumulation_steps": 4}
    by_file = "accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json"
    named = Example(deepspeed=deepspeed, script=script, arguments=arguments, command=by_file)
    (found,) = _found(named, _STEPS)
    assert found == f"accumulation-differs: {shown} with gradient_accumulation_steps=4 in ds_config.json"


_LAUNCH = "accelerate launch --config_file accelerate.yaml"


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (_told("4"), ""),
        (_told("1"), "--gradient_accumulation_steps 4"),
        (_script(_OPTION.format(4)), ""),
        (_script(given="**vars(args)"), ""),
        (_script(), ""),  # it counts nothing by itself: accelerate takes the file's number
        (_script(_OPTION.format(1)) + "accelerator.gradient_accumulation_steps = 4\n", ""),
    ],
)
def test_scripts_that_agree_with_the_file(script: str, arguments: str) -> None:
    launched = Example(
        accelerate=_launched(gradient_accumulation_steps=4),
        script=script,
        arguments=arguments,
        command=_LAUNCH,
    )
    assert _found(launched, _STEPS) == []


_PRECISION_OPTION = 'parser.add_argument("--mixed_precision", default={})'
_FROM_ARGUMENT = "mixed_precision=args.mixed_precision"


def _launch(flags: str, precision: str | None, script: str, arguments: str = "") -> Example:
    file = {**LAUNCH_FILE, "distributed_type": "MULTI_GPU", "num_processes": 2}
    if precision is not None:
        file["mixed_precision"] = precision
    return Example(accelerate=file, command=f"{_LAUNCH}{flags}", script=script, arguments=arguments)


@pytest.mark.parametrize(
    ("example", "shown"),
    [
        (_launch(" --mixed_precision fp16", None, _script(given='mixed_precision="no"')), "no"),
        (_launch(" --mixed_precision=bf16", "no", _script(given='mixed_precision="no"')), "no"),
        (_launch("", "bf16", _script(given='mixed_precision="no"')), "no"),
        (_launch("", "fp16", _script(_PRECISION_OPTION.format('"no"'), _FROM_ARGUMENT)), "no"),
        (_launch(" --mixed_precision bf16", None, _script(given='mixed_precision="fp16"')), "fp16"),
        (
            _launch(
                " --mixed_precision bf16",
                None,
                _script(_PRECISION_OPTION.format('"no"'), _FROM_ARGUMENT),
                "--mixed_precision fp16",
            ),
            "fp16",
        ),
    ],
)
def test_the_script_sets_the_precision_in_place_of_the_launcher(example: Example, shown: str) -> None:
    (found,) = _found(example, _PRECISION)
    assert shown in found
    assert " with " in found


@pytest.mark.parametrize(
    "example",
    [
        _launch(" --mixed_precision fp16", None, _script()),
        _launch(" --mixed_precision fp16", None, _script(given="mixed_precision=None")),
        _launch(" --mixed_precision fp16", None, _script(_PRECISION_OPTION.format("None"), _FROM_ARGUMENT)),
        _launch("", "no", _script(given='mixed_precision="bf16"')),  # only the script asks for one
        _launch("", None, _script(given='mixed_precision="bf16"')),
        _launch(" --mixed_precision bf16", "no", _script(given='mixed_precision="bf16"')),
        # the line's own argument takes the place of a file on purpose
        _launch(
            "", "fp16", _script(_PRECISION_OPTION.format("None"), _FROM_ARGUMENT), "--mixed_precision no"
        ),
        Example(
            deepspeed={**zero(2), "bf16": {"enabled": True}},
            command="accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json "
            "--mixed_precision bf16",
            script=_script(given='mixed_precision="no"'),
        ),  # the file decides
    ],
)
def test_precisions_that_do_not_contradict(example: Example) -> None:
    assert _found(example, _PRECISION) == []


def test_the_run_is_taken_to_be_of_the_scripts_precision() -> None:
    (situation,) = situations_of_example(_launch("", "bf16", _script(given='mixed_precision="no"')))
    assert situation.settings.precision is not None
    assert json.dumps(situation.settings.precision.value) == '"fp32"'
