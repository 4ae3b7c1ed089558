"""Arguments, their files and the source to fields of TrainingArguments."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from zerofit.checking.inputs.training_arguments import read_training_arguments
from zerofit.configs.schemas.catalog import load_schema
from zerofit.core.setting import Confidence, Place, Said
from zerofit.scripts.facts import Action, Keyword, ScriptCall, Sighting

_FIELDS = load_schema("training_arguments").root

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
    assert not settings.shows_all


def test_defaults_are_known_where_the_scripts_parser_makes_them_of_its_arguments() -> None:
    for arguments, parses_all in ((["--seed", "1"], True), (["train.json"], True), (["--seed", "1"], False)):
        settings = read_training_arguments(fields=_FIELDS, arguments=arguments, parses_all=parses_all)
        assert settings.shows_all == (arguments[0] == "--seed" and parses_all)


def _call(text: str, *given: str) -> ScriptCall:
    seen = Sighting(text=text, place=Place(file="train.py", line=3))
    return ScriptCall(action=Action.MAKE_ARGUMENTS, seen=seen, given=frozenset(given))


_BF16 = Keyword(name="bf16", value=True, line=3, column=5, text="bf16=True")
_OLD = Keyword(name="evaluation_strategy", value="no", line=4, column=5, text='evaluation_strategy="no"')


def test_keywords_of_the_source_are_likely() -> None:
    settings = read_training_arguments(
        fields=_FIELDS,
        arguments=["--bf16", "false"],  # the script's own
        keywords=[_BF16, _OLD],
        script="train.py",
        made=[
            _call("transformers.TrainingArguments(bf16=True, seed=s)", "bf16", "evaluation_strategy", "seed")
        ],
    )
    assert settings.said == {
        "bf16": Said(
            value=True,
            text="bf16=True",
            place=Place(file="train.py", line=3, column=5),
            confidence=Confidence.LIKELY,
        )
    }
    assert settings.unread == {"seed"}
    assert [said.value for said in settings.surplus] == ["evaluation_strategy"]
    steps = settings.find_or_default("gradient_accumulation_steps")
    assert steps is not None
    assert (steps.value, steps.text) == (1, "no gradient_accumulation_steps, so it is 1")


@pytest.mark.parametrize(
    "call",
    [_call("TrainingArguments(bf16=True, **more)", "bf16", "**"), _call("SFTConfig(bf16=True)", "bf16")],
)
def test_defaults_are_not_known_where_more_may_come(call: ScriptCall) -> None:
    settings = read_training_arguments(fields=_FIELDS, keywords=[_BF16], script="train.py", made=[call])
    assert settings.find_or_default("gradient_accumulation_steps") is None
    assert settings.surplus == ()
