"""Arguments, their files and the source to fields of TrainingArguments."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from zerofit.checking.inputs.training_arguments import read_training_arguments
from zerofit.configs.schemas.catalog import load_schema
from zerofit.core.command import Route
from zerofit.core.setting import Confidence, Place, Said
from zerofit.scripts.facts import Action, Keyword, ScriptCall, ScriptFacts, Snippet
from zerofit.scripts.source.read_script import read_script

_FIELDS = load_schema("training_arguments").root


def _script(**facts: Any) -> ScriptFacts:
    return ScriptFacts(name="train.py", route=Route.TRAINER, **facts)


_ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("--bf16", {"bf16": True}),
    ("--bf16 True --fp16 false", {"bf16": True, "fp16": False}),
    (
        "--gradient_accumulation_steps 8 --learning-rate=2e-5",
        {"gradient_accumulation_steps": 8, "learning_rate": 2e-5},
    ),
    ("--no_dataloader_pin_memory --seed -1", {"dataloader_pin_memory": False, "seed": -1}),
    ("--deepspeed ds.json --bf16 --do_train", {"deepspeed": "ds.json", "bf16": True, "do_train": True}),
    ("--gradient_acc 2", {"gradient_accumulation_steps": 2}),  # argparse completes a name
    ("--seed 1 --seed 2", {"seed": 2}),
    ("--seed two", {"seed": "two"}),
    ("train.json --", {}),
    ("--model_name gpt2", {"model_name": "gpt2"}),
]


@pytest.mark.parametrize(("arguments", "expected"), _ARGUMENTS)
def test_arguments(arguments: str, expected: dict[str, Any]) -> None:
    settings = read_training_arguments(fields=_FIELDS, arguments=shlex.split(arguments))
    assert {name: said.value for name, said in settings.said.items()} == expected
    assert not settings.is_complete


@pytest.mark.parametrize(
    ("arguments", "is_complete"), [("--seed 1", True), ("train.json", False), ("", False)]
)
def test_defaults_are_known_where_all_comes_from_the_command_line(arguments: str, is_complete: bool) -> None:
    script = _script(parses_plain_arguments=True)
    settings = read_training_arguments(fields=_FIELDS, arguments=arguments.split(), script=script)
    assert settings.is_complete is is_complete


_PLAIN = "from transformers import HfArgumentParser, TrainingArguments\n"
_MODULE = "import transformers\nfrom transformers import HfArgumentParser\n"
_PARSES = "parser.parse_args_into_dataclasses()\n"


@pytest.mark.parametrize(
    ("source", "is_plain"),
    [
        (f"{_PLAIN}parser = HfArgumentParser(TrainingArguments)\n", True),
        (f"{_MODULE}parser = HfArgumentParser((Data, transformers.TrainingArguments))\n", True),
        (
            f"{_MODULE}class TrainingArguments(transformers.TrainingArguments):\n    optim: str = 'sgd'\n"
            "parser = HfArgumentParser(TrainingArguments)\n",
            False,
        ),
        ("from mine import TrainingArguments\nparser = HfArgumentParser(TrainingArguments)\n", False),
        ("from trl import SFTConfig, TrlParser\nparser = TrlParser((Script, SFTConfig))\n", False),
    ],
)
def test_a_parser_of_other_classes_has_other_defaults(source: str, is_plain: bool) -> None:
    assert read_script(source + _PARSES, name="train.py").parses_plain_arguments is is_plain
    assert not read_script(source, name="train.py").parses_plain_arguments


def _call(text: str, *given: str) -> ScriptCall:
    seen = Snippet(text=text, place=Place(file="train.py", line=3))
    return ScriptCall(action=Action.MAKE_ARGUMENTS, seen=seen, given=frozenset(given))


_BF16 = Keyword(name="bf16", value=True, text="bf16=True", place=Place(file="train.py", line=3, column=5))
_OLD = Keyword(
    name="evaluation_strategy",
    value="no",
    text='evaluation_strategy="no"',
    place=Place(file="train.py", line=4, column=5),
)


_GIVEN = ("bf16", "evaluation_strategy", "seed", "fsdp_config", "logging_dir")


def test_keywords_of_the_source_are_likely() -> None:
    # A mapping's items are no fields; a field that does not exist needs no known value.
    settings = read_training_arguments(
        fields=_FIELDS,
        arguments=["--bf16", "false"],  # the script's own
        script=_script(
            training_arguments=(_BF16, _OLD, replace(_OLD, name="fsdp_config.version")),
            calls=(_call("transformers.TrainingArguments(seed=s)", *_GIVEN),),
        ),
    )
    assert settings.said == {
        "bf16": Said(
            value=True,
            text="bf16=True",
            place=Place(file="train.py", line=3, column=5),
            confidence=Confidence.LIKELY,
        )
    }
    assert settings.unread == {"seed", "fsdp_config", "logging_dir"}
    assert [(said.value, said.text) for said in settings.surplus] == [
        ("evaluation_strategy", 'evaluation_strategy="no"'),
        ("logging_dir", "logging_dir=..."),
    ]
    steps = settings.find_or_default("gradient_accumulation_steps")
    assert steps is not None
    assert (steps.value, steps.text) == (1, "no gradient_accumulation_steps, so it is 1")


@pytest.mark.parametrize(
    "call",
    [_call("TrainingArguments(bf16=True, **more)", "bf16", "**"), _call("SFTConfig(bf16=True)", "bf16")],
)
def test_defaults_are_not_known_where_more_may_come(call: ScriptCall) -> None:
    script = _script(training_arguments=(_BF16,), calls=(call,))
    settings = read_training_arguments(fields=_FIELDS, script=script)
    assert settings.find_or_default("gradient_accumulation_steps") is None
    assert settings.surplus == ()
