"""TrainingArguments from the script's arguments, its source, or a recipe."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.programs import (
    AXOLOTL,
    LLAMA_FACTORY,
    SWIFT,
    WORDS_OF_SWIFT,
    former_names_of,
)
from zerofit.checking.inputs.script_arguments import argument_pairs
from zerofit.checking.situation import TrainerSettings
from zerofit.configs.document import FileKind
from zerofit.configs.schema import ValueKind
from zerofit.core.command import Route, is_literal
from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action
from zerofit.scripts.source.names import PLAIN_ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from zerofit.checking.inputs.programs import OtherProgram
    from zerofit.checking.targets import Targets
    from zerofit.configs.document import Document
    from zerofit.configs.schema import Key, Schema, Section
    from zerofit.scripts.facts import ScriptCall, ScriptFacts

# The conversion of transformers/hf_argparser.py, string_to_bool.
_TRUE = ("yes", "true", "t", "y", "1")
_FALSE = ("no", "false", "f", "n", "0")
_ARGUMENT = re.compile(r"[a-z_]\w*")
_PAIR = re.compile(r"[a-z_]\w*=")
_AXOLOTL = {
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "bfloat16": "bf16",
    "float16": "fp16",
}
"""Axolotl's names of fields of TrainingArguments.

Source: https://github.com/axolotl-ai-cloud/axolotl/blob/main/src/axolotl/core/builders/base.py
"""
_OF_MODEL = ("use_unsloth", "quantization_bit", "load_in_4bit", "load_in_8bit")
"""Keys of recipes that are no TrainingArguments, and that rules on the model need."""
_OF_GENERATIONS = ("num_generations", "use_vllm", "vllm_mode", "vllm_server_host")
"""Arguments of TRL's configs that ms-swift has, too."""
_AXOLOTL_MARK = "base_model"
"""The key that each of its recipes must have."""
_LLAMA_FACTORY_MARKS = ("finetuning_type", "cutoff_len", "template")
"""Keys of LLaMA-Factory's recipes, one of which each has."""


def read_training_arguments(
    *,
    fields: Section,
    arguments: Sequence[str] = (),
    script: ScriptFacts | None = None,
    recipe: Document | None = None,
    program: OtherProgram | None = None,
    former: Collection[str] = (),
) -> TrainerSettings:
    """Return the known TrainingArguments of a run.

    A script that calls TrainingArguments(...) itself sets them there. Otherwise they come from the script's
    arguments, by HfArgumentParser or similar.

    Args:
        fields: the fields of TrainingArguments, as in Schemas.training_arguments.
        arguments: the script's own arguments.
        script: the facts of its source; None if unknown.
        recipe: the file with them that the script reads; its arguments override it.
        program: the program that takes the arguments, and adds fields of its own to TrainingArguments.
        former: names that TrainingArguments had in other releases.
    """
    keywords = script.training_arguments if script else ()
    made = script.find(Action.MAKE_ARGUMENTS) if script else ()
    if not keywords and not made:
        parses_all = script is not None and script.parses_plain_arguments and recipe is None
        is_complete = parses_all and any(word.startswith("--") for word in arguments)
        is_complete = is_complete and not _are_open(arguments, fields)
        said = _of_recipe(recipe, fields, former) if recipe is not None else {}
        typed = dict(_of_arguments(arguments, fields))
        if program is not None:
            typed = _of_program(program, typed, fields, former)
        return TrainerSettings(
            said={**said, **typed},
            fsdp_config=_config_of_recipe(recipe),
            axolotl_fsdp=_fsdp_of_axolotl(recipe),
            is_complete=is_complete,
            confidence=Confidence.CERTAIN if is_complete else Confidence.LIKELY,
        )
    said = {keyword.name: keyword.said for keyword in keywords}
    if len(made) > 1:  # each may be another Trainer's
        said = {name: replace(field, confidence=Confidence.LIKELY) for name, field in said.items()}
    is_certain = any(field.confidence is Confidence.CERTAIN for field in said.values())
    given = frozenset(name for call in made for name in call.given) - {"**"}
    is_open = any("**" in call.given for call in made)
    is_plain = len(made) == 1 and _class_of(made[0].seen.text) in PLAIN_ARGUMENTS
    return TrainerSettings(
        said={name: field for name, field in said.items() if fields.find(name) is not None},
        unread=given - set(said),
        fsdp_config=_fsdp_config(said),
        is_complete=is_plain and not is_open,
        confidence=Confidence.CERTAIN if is_certain else Confidence.LIKELY,
        surplus=tuple(
            replace(said.get(name) or _computed(name, made[0]), value=name)
            for name in sorted(given)
            if is_plain and fields.find(name) is None
        ),
    )


def _fsdp_config(said: Mapping[str, Said[Any]]) -> dict[str, Said[Any]] | None:
    """Return the keys of a dictionary fsdp_config in the script's source; None without any."""
    keys = {name: field for name, field in said.items() if name.startswith("fsdp_config.")}
    return {name.partition(".")[2]: field for name, field in keys.items()} or None


def _are_open(arguments: Sequence[str], fields: Section) -> bool:
    """Return True if a shell variable among the arguments may stand for others, rather than for a value."""
    for before, word in zip(("", *arguments), arguments, strict=False):
        if word.startswith("$"):
            key, _ = _key(fields, before.removeprefix("--").replace("-", "_"))
            is_value = before.startswith("--") and "=" not in before
            if not is_value or "@" in word or (key is not None and ValueKind.BOOL in key.kinds):
                return True
    return False


def _of_program(
    program: OtherProgram, typed: Mapping[str, Said[Any]], fields: Section, former: Collection[str]
) -> dict[str, Said[Any]]:
    """Return those of a program's arguments that certainly are TrainingArguments'; the others are its own."""
    names = {*(key.name for key in fields.keys), *former, *_OF_GENERATIONS}
    names -= former_names_of(program.package)
    if program.package == SWIFT:
        names -= set(WORDS_OF_SWIFT)
    if program.package != AXOLOTL:
        return {name: said for name, said in typed.items() if name in names}
    found = {}
    for name, said in typed.items():
        key = fields.find(_AXOLOTL.get(name, name))
        value = said.value
        if key is not None and isinstance(value, str):
            value = _converted(key, value, is_negated=False)
        if key is not None and value not in (None, "auto") and (not key.choices or value in key.choices):
            found[key.name] = replace(said, value=value)
    return found


def _of_recipe(recipe: Document, fields: Section, former: Collection[str]) -> dict[str, Said[Any]]:
    """Return the fields of TrainingArguments that a recipe sets.

    Axolotl and LLaMA-Factory have keys of their own, some of them former fields, so that of their recipes
    only known fields are taken, and the former ones that LLaMA-Factory hands on. Axolotl replaces "auto", and
    has optimizers of its own.
    """
    is_axolotl = recipe.at(_AXOLOTL_MARK) is not None
    is_llama_factory = any(recipe.at(mark) is not None for mark in _LLAMA_FACTORY_MARKS)
    handed_on = set(former) - former_names_of(LLAMA_FACTORY) if is_llama_factory else set()
    found: dict[str, Said[Any]] = {}
    for entry in recipe.root.entries:
        said = recipe.said(entry.key)
        name = _AXOLOTL.get(entry.key, entry.key) if is_axolotl else entry.key
        key = fields.find(name)
        if said is None or isinstance(said.value, (dict, list)) or not is_literal(str(said.value)):
            continue
        value = said.value
        if key is not None and isinstance(value, str):
            value = _converted(key, value, is_negated=False)
        is_replaced = key is not None and bool(key.choices) and value not in key.choices
        is_replaced = is_axolotl and (is_replaced or said.value in (None, "auto"))
        is_kept = name in handed_on or name in _OF_MODEL
        is_own = key is None and not is_kept and (is_axolotl or is_llama_factory)
        if not is_replaced and not is_own:
            found[name] = replace(said, value=value)
    return found


def _config_of_recipe(recipe: Document | None) -> dict[str, Said[Any]] | None:
    """Return the keys of a recipe's fsdp_config, except Axolotl's, which has its own; None without one."""
    section = recipe.value("fsdp_config") if recipe is not None else None
    if recipe is None or not isinstance(section, dict) or recipe.at(_AXOLOTL_MARK) is not None:
        return None
    found = {str(key): recipe.said("fsdp_config", key) for key in section}
    return {key: said for key, said in found.items() if said is not None}


def _fsdp_of_axolotl(recipe: Document | None) -> dict[str, Said[Any]] | None:
    """Return the keys of fsdp_config in a recipe of Axolotl, by their names without "fsdp_"; None without."""
    section = recipe.value("fsdp_config") if recipe is not None else None
    if recipe is None or not isinstance(section, dict) or recipe.at(_AXOLOTL_MARK) is None:
        return None
    found = {str(key): recipe.said("fsdp_config", key) for key in section}
    found.setdefault("version", recipe.said("fsdp_version"))
    return {key.removeprefix("fsdp_"): said for key, said in found.items() if said is not None}


def _computed(name: str, call: ScriptCall) -> Said[Any]:
    """Return a keyword whose value the source does not show, at the call's position."""
    text = f"{name}=..."
    return Said(value=None, text=text, place=call.seen.place, confidence=Confidence.LIKELY)


def _class_of(text: str) -> str:
    """Return "TrainingArguments" of "transformers.TrainingArguments(output_dir=...)"."""
    return text.partition("(")[0].rpartition(".")[2]


def _of_arguments(arguments: Sequence[str], fields: Section) -> Iterator[tuple[str, Said[Any]]]:
    for written, value, text in argument_pairs(arguments):
        name = written.removeprefix("training_arguments.").removeprefix("training_args.")
        key, is_negated = _key(fields, name)
        if key is not None:
            yield key.name, Said(value=_converted(key, value, is_negated=is_negated), text=text)
        elif _ARGUMENT.fullmatch(name):
            yield name, Said(value=value, text=text)


def _key(fields: Section, name: str) -> tuple[Key | None, bool]:
    """Return the field that argparse resolves a name to, and whether the name negates it.

    argparse accepts unambiguous prefixes.
    """
    key = fields.find(name)
    if key is not None:
        return key, False
    if name.startswith("no_") and fields.find(name.removeprefix("no_")) is not None:
        return fields.find(name.removeprefix("no_")), True
    fitting = [key for key in fields.keys if key.name.startswith(name)]
    return (fitting[0] if len(fitting) == 1 else None), False


def _converted(key: Key, value: str | None, *, is_negated: bool) -> Any:
    """Return an argument's value as converted by HfArgumentParser; the text itself if it can't be."""
    if is_negated:
        return False
    if ValueKind.BOOL in key.kinds:
        return _boolean(value)
    if value is None:
        return None
    numbers: Mapping[ValueKind, type[int] | type[float]] = {ValueKind.INTEGER: int, ValueKind.NUMBER: float}
    for kind, number in numbers.items():
        if kind in key.kinds:
            try:
                return number(value)
            except ValueError:
                return value
    return value


def _boolean(value: str | None) -> Any:
    if value is None or value.lower() in _TRUE:
        return True
    return False if value.lower() in _FALSE else value


def trainer_of(script: ScriptFacts | None, route: Route | None, targets: Targets) -> TrainerSettings | None:
    """Return the known TrainingArguments; None without a Trainer, or if its fields are unknown."""
    if route is not Route.TRAINER or targets.schemas is None:
        return None
    known = read_training_arguments(
        fields=targets.schemas.training_arguments.root,
        arguments=_arguments_of(targets),
        script=script,
        recipe=recipe_of(targets),
        program=targets.program,
        former=_former_names(targets.schemas.training_arguments),
    )
    document = next((file.document for file in targets.files if file.kind is FileKind.FSDP), None)
    return known if document is None else _with_fsdp_file(known, document, is_alone=script is None)


def _with_fsdp_file(known: TrainerSettings, document: Document, *, is_alone: bool) -> TrainerSettings:
    """Return settings with the keys of the file that fsdp_config names.

    Args:
        known: the other settings.
        document: the file.
        is_alone: True if no script is known that may not set fsdp.
    """
    keys = {entry.key: document.said(entry.key) for entry in document.root.entries}
    config = {key: said for key, said in keys.items() if said is not None}
    said = dict(known.said)
    if is_alone and not said and "fsdp" not in known.unread:
        said["fsdp"] = Said(value=True, text=document.name, confidence=Confidence.LIKELY)
    return replace(known, said=said, fsdp_config=config)


def _former_names(schema: Schema) -> frozenset[str]:
    """Return the names of fields that only other releases have."""
    others = frozenset(other.path[0] for other in schema.other_releases)
    return others | {gone.path[0] for gone in schema.removed}


def _arguments_of(targets: Targets) -> tuple[str, ...]:
    """Return the arguments as flags: LLaMA-Factory also takes NAME=VALUE behind its recipe."""
    if targets.program is None or targets.program.package not in ("llamafactory-cli", "lmf"):
        return targets.arguments
    return tuple(f"--{word}" if _PAIR.match(word) else word for word in targets.arguments)


def recipe_of(targets: Targets) -> Document | None:
    """Return the recipe that a run reads."""
    recipes = (file.document for file in targets.files if file.kind is FileKind.RECIPE)
    return next(filter(None, recipes), None)
