"""Who reads a DeepSpeed file first: HfDeepSpeedConfig, zero.Init, Accelerator, TrainingArguments."""

from __future__ import annotations

from typing import Any

import pytest
from rule_examples.example import Example, zero
from rule_situations import situations_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules.deepspeed import early_reads
from zerofit.core.plan import Topology

_IMPORTS = """\
import argparse
import copy
import json
from pathlib import Path
import deepspeed
import torch
from accelerate import Accelerator, PartialState
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from transformers.integrations import HfDeepSpeedConfig
"""
_MODEL = 'model = AutoModelForCausalLM.from_pretrained("mine")\n'
_ENGINE = 'engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")\n'
_ARGUMENTS = 'arguments = TrainingArguments("out", bf16=True, deepspeed="ds_config.json")\n'
_TRAINER = f"{_ARGUMENTS}Trainer(model=model, args=arguments, train_dataset=rows).train()\n"
_KEPT = 'kept = HfDeepSpeedConfig("ds_config.json")\n'
_LOADED = 'with open("ds_config.json") as file:\n    settings = json.load(file)\n'
_KEEPS = "kept = HfDeepSpeedConfig(settings)\n"
_OWN = "class Mine(torch.nn.Module):\n    pass\n"
_MAKES = "model = Mine()\n"
_AUTO = zero(3, train_batch_size="auto", gradient_accumulation_steps="auto")
_WRITTEN = zero(3, train_batch_size=16, gradient_accumulation_steps=2)
_OPEN = zero(3, train_batch_size=16, gradient_accumulation_steps="auto")


def _found(
    script: str, deepspeed: dict[str, Any], arguments: str = "", ranks: int = 4
) -> list[tuple[str, str]]:
    example = Example(
        script=_IMPORTS + script,
        deepspeed=deepspeed,
        arguments=arguments,
        topology=Topology(world_size=ranks),
    )
    return [
        (finding.rule, str(finding.confidence))
        for situation in situations_of_example(example)
        for finding in check(situation, rules=early_reads.RULES).findings
    ]


_READS = {
    "a dictionary of the file, then a Trainer": f"{_LOADED}{_KEEPS}{_MODEL}{_TRAINER}",
    "a name of the file, then deepspeed.initialize": (
        f'FILE = "ds_config.json"\nkept = HfDeepSpeedConfig(FILE)\n{_MODEL}{_ENGINE}'
    ),
    "in functions": (
        f"def settings():\n    return json.loads(Path('ds_config.json').read_text())\n"
        f"def main():\n    kept = HfDeepSpeedConfig(settings())\n    {_MODEL}    {_ENGINE}"
        'if __name__ == "__main__":\n    main()\n'
    ),
    "a copy, then Accelerator": (
        f"{_LOADED}kept = HfDeepSpeedConfig(copy.deepcopy(settings))\n{_MODEL}accelerator = Accelerator()\n"
        "model = accelerator.prepare(model)\n"
    ),
    "after Accelerator, whose configuration it replaces": (
        f"accelerator = Accelerator()\n{_KEPT}{_MODEL}model = accelerator.prepare(model)\n"
    ),
    "after TrainingArguments, whose configuration it replaces": f"{_ARGUMENTS}{_KEPT}{_MODEL}{_TRAINER}",
    "by a field of TrainingArguments": (
        f"{_ARGUMENTS}kept = HfDeepSpeedConfig(arguments.deepspeed)\n{_MODEL}{_TRAINER}"
    ),
    "a model by its configuration": (
        f'{_KEPT}model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("mine"))\n{_ENGINE}'
    ),
    "zero.Init with the file": (
        f'{_OWN}with deepspeed.zero.Init(config_dict_or_path="ds_config.json"):\n    {_MAKES}{_ENGINE}'
    ),
    "zero.Init with a dictionary of the file": (
        f"{_OWN}{_LOADED}with deepspeed.zero.Init(config_dict_or_path=settings):\n    {_MAKES}{_ENGINE}"
    ),
}
_READS_BY_ARGUMENT = {
    "argparse": (
        "parser = argparse.ArgumentParser()\nparser.add_argument('--settings')\nargs = parser.parse_args()\n"
        f"kept = HfDeepSpeedConfig(args.settings)\n{_MODEL}"
        "engine, *_ = deepspeed.initialize(model=model, config=args.settings)\n",
        "--settings ds_config.json --deepspeed ds_config.json",
    ),
    "HfArgumentParser": (
        "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
        f"kept = HfDeepSpeedConfig(args.deepspeed)\n{_MODEL}"
        "Trainer(model=model, args=args, train_dataset=rows).train()\n",
        "--deepspeed ds_config.json --output_dir out",
    ),
}


@pytest.mark.parametrize("script", _READS.values(), ids=_READS)
def test_auto_is_read_before_it_is_filled_in(script: str) -> None:
    assert _found(script, _AUTO) == [("zero-init-reads-auto", "certain")]


@pytest.mark.parametrize(("script", "arguments"), _READS_BY_ARGUMENT.values(), ids=_READS_BY_ARGUMENT)
def test_the_file_is_named_by_an_argument(script: str, arguments: str) -> None:
    assert _found(script, _AUTO, arguments) == [("zero-init-reads-auto", "certain")]
    assert _found(script, _AUTO) == [("zero-init-reads-auto", "likely")]
    assert _found(script, _AUTO, arguments.replace("ds_config", "other")) == []


@pytest.mark.parametrize(
    "sizes",
    [
        {"train_micro_batch_size_per_gpu": "auto"},
        {"gradient_accumulation_steps": "auto"},
        {"train_batch_size": "auto"},
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": "auto"},
        {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"},
    ],
)
def test_each_of_the_three_sizes_is_refused_as_auto(sizes: dict[str, Any]) -> None:
    assert _found(_KEPT + _MODEL + _ENGINE, zero(3, **sizes)) == [("zero-init-reads-auto", "certain")]


_AS_IT_IS_OR_NOT = {
    "the model is made first": f"{_MODEL}{_KEPT}{_ENGINE}",
    "TrainingArguments come between": f"{_KEPT}{_ARGUMENTS}{_MODEL}{_TRAINER}",
    "TrainingArguments alone": f"{_ARGUMENTS}{_MODEL}{_TRAINER}",
    "a key of the dictionary is set": (
        f'{_LOADED}settings["train_batch_size"] = 8\n{_KEEPS}{_MODEL}{_ENGINE}'
    ),
    "the dictionary is updated": (f"{_LOADED}settings.update(sizes())\n{_KEEPS}{_MODEL}{_ENGINE}"),
    "keys are deleted": (f'{_LOADED}del settings["train_batch_size"]\n{_KEEPS}{_MODEL}{_ENGINE}'),
    "a function fills the dictionary in": (
        f"from helpers import fill\n{_LOADED}fill(settings)\n{_KEEPS}{_MODEL}{_ENGINE}"
    ),
    "it is another file": f'kept = HfDeepSpeedConfig("ds_small.json")\n{_MODEL}{_ENGINE}',
    "the file's name is not known": f"kept = HfDeepSpeedConfig(pick())\n{_MODEL}{_ENGINE}",
    "it is an attribute of another object": f"kept = HfDeepSpeedConfig(run.settings)\n{_MODEL}{_ENGINE}",
    "the argument is replaced": f"args.ds = fill(args.ds)\nkept = HfDeepSpeedConfig(args.ds)\n{_MODEL}",
    "the weights are quantized": (
        _KEPT + _MODEL.replace('"mine"', '"mine", quantization_config=four_bits') + _ENGINE
    ),
    "accelerate's own class, which transformers does not know": (
        f"from accelerate.utils import HfDeepSpeedConfig\n{_KEPT}{_MODEL}"
    ),
}


@pytest.mark.parametrize("script", _AS_IT_IS_OR_NOT.values(), ids=_AS_IT_IS_OR_NOT)
def test_nothing_reads_the_file_as_it_is(script: str) -> None:
    assert _found(script, _AUTO) == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_zero3_transformers_does_not_read_it(stage: int) -> None:
    assert _found(_KEPT + _MODEL + _ENGINE, {**_AUTO, "zero_optimization": {"stage": stage}}) == []


def test_a_condition_of_the_script_makes_it_likely() -> None:
    assert _found(f"if args.partition:\n    {_KEPT}{_MODEL}{_ENGINE}", _AUTO) == [
        ("zero-init-reads-auto", "likely")
    ]


@pytest.mark.parametrize("script", _READS.values(), ids=_READS)
def test_a_written_batch_size_is_checked_against_one_rank(script: str) -> None:
    # Accelerator() and TrainingArguments tell DeepSpeed the ranks.
    is_set_up = script.startswith(("accelerator =", "arguments ="))
    assert _found(script, _WRITTEN) == ([] if is_set_up else [("zero-init-counts-one-rank", "certain")])


@pytest.mark.parametrize(
    ("script", "deepspeed", "ranks"),
    [
        (f"deepspeed.init_distributed()\n{_KEPT}{_MODEL}{_ENGINE}", _WRITTEN, 4),
        (f"state = PartialState()\n{_KEPT}{_MODEL}{_ENGINE}", _WRITTEN, 4),
        (f"{_KEPT}{_MODEL}{_ENGINE}", zero(3, train_batch_size=4, gradient_accumulation_steps=2), 4),
        (f"{_KEPT}{_MODEL}{_ENGINE}", _WRITTEN, 1),
        (f"{_KEPT}{_MODEL}{_ENGINE}", {**zero(3), "train_batch_size": 7}, 4),
        (f"{_KEPT}{_MODEL}{_ENGINE}", {"train_batch_size": 16, "zero_optimization": {"stage": 3}}, 4),
    ],
)
def test_one_rank_is_not_the_reason(script: str, deepspeed: dict[str, Any], ranks: int) -> None:
    assert _found(script, deepspeed, ranks=ranks) == []


_ACCELERATOR = f"accelerator = Accelerator()\n{_MODEL}model = accelerator.prepare(model)\n"


@pytest.mark.parametrize(
    "deepspeed",
    [
        _OPEN,
        {**_OPEN, "train_micro_batch_size_per_gpu": "auto"},
        {"train_batch_size": 16, "zero_optimization": {"stage": 3}},
        {"train_batch_size": 64, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}},
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
    ],
)
def test_accelerate_takes_1_for_missing_sizes(deepspeed: dict[str, Any]) -> None:
    assert _found(_ACCELERATOR, deepspeed) == [("accelerate-zero-init-takes-1", "certain")]


@pytest.mark.parametrize(
    ("script", "deepspeed"),
    [
        (_ACCELERATOR, _AUTO),
        (_ACCELERATOR, {**_OPEN, "train_batch_size": 8}),
        (_ACCELERATOR, {**_OPEN, "zero_optimization": {"stage": 2}}),
        (_ACCELERATOR, zero(3, train_batch_size=8)),
        (f"{_MODEL}accelerator = Accelerator()\nmodel = accelerator.prepare(model)\n", _OPEN),
        (_OWN + _ACCELERATOR.replace(_MODEL, _MAKES), _OPEN),
        (f"{_ARGUMENTS}{_MODEL}{_TRAINER}", _OPEN),
        (
            _ACCELERATOR.replace(_MODEL, f"with plugin.zero3_init_context_manager():\n    {_MODEL}"),
            _OPEN,
        ),
    ],
)
def test_accelerate_takes_no_1(script: str, deepspeed: dict[str, Any]) -> None:
    assert _found(script, deepspeed) == []


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (f'HfDeepSpeedConfig("ds_config.json")\n{_MODEL}{_ENGINE}', True),
        (f"{_LOADED}HfDeepSpeedConfig(settings)\n{_MODEL}{_ENGINE}", True),
        (f"def announce():\n    {_KEPT}announce()\n{_MODEL}{_ENGINE}", True),
        (f"def announce():\n    {_KEPT}    return kept\nkept = announce()\n{_MODEL}{_ENGINE}", False),
        (f"def announce():\n    global kept\n    {_KEPT}announce()\n{_MODEL}{_ENGINE}", False),
        (f"class Run:\n    def __init__(self):\n        self.{_KEPT}run = Run()\n{_MODEL}{_ENGINE}", False),
        (f"{_KEPT}{_MODEL}{_ENGINE}", False),
    ],
)
def test_an_hf_config_that_nothing_keeps_is_gone(script: str, found: bool) -> None:
    expected = [("hf-config-not-kept", "certain")] if found else []
    assert _found(script, zero(3)) == expected


_READER_TELLS = "create the TrainingArguments before the model and leave HfDeepSpeedConfig out, or "
_NUMBERS = (
    "write numbers for train_micro_batch_size_per_gpu and gradient_accumulation_steps, and leave "
    "train_batch_size out"
)


@pytest.mark.parametrize(
    ("script", "fix"),
    [
        (f"{_KEPT}{_MODEL}{_TRAINER}", f"{_READER_TELLS}{_NUMBERS}"),
        (f"{_KEPT}{_MODEL}{_ENGINE}", _NUMBERS),
        (
            f'{_OWN}with deepspeed.zero.Init(config_dict_or_path="ds_config.json"):\n    {_MAKES}{_TRAINER}',
            _NUMBERS,
        ),
    ],
)
def test_who_fills_auto_in_is_named_where_another_call_reads_it(script: str, fix: str) -> None:
    example = Example(script=_IMPORTS + script, deepspeed=_AUTO, topology=Topology(world_size=4))
    found = [
        finding.fix
        for situation in situations_of_example(example)
        for finding in check(situation, rules=early_reads.RULES).findings
        if finding.rule == "zero-init-reads-auto"
    ]
    assert found == [fix]
