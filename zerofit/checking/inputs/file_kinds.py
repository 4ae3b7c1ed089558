"""Recognizes the kind of a file by its name and keys: a DeepSpeed or accelerate configuration, or another."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from zerofit.configs.document import Entries, FileKind, Format

if TYPE_CHECKING:
    from zerofit.configs.document import Document
    from zerofit.configs.schema import Schema, Schemas

_IN_YAML = "a DeepSpeed configuration in YAML, which DeepSpeed does not read"
_UNKNOWN = "something else: none of its keys is DeepSpeed's or accelerate's, or similar"
_LEAST_SHARE = 0.1
"""ASSUMPTION: the minimum share of known keys in a configuration. In the real file with the lowest share,
which also has all settings of a model, it is a fifth."""
_RECIPE_KEYS = """
    base_model cutoff_len dataset datasets dataset_name finetuning_type lora_alpha lora_r lora_rank
    model_name_or_path num_epochs sequence_len stage template
"""
"""Keys of LLaMA-Factory's, Axolotl's and TRL's recipes, beside those of TrainingArguments."""


def kind_of(document: Document, schemas: Schemas) -> FileKind | str:
    """Return a document's kind, or a short description if it is nothing to check.

    Keys decide, since the extension says nothing. A file without keys, or with all keys misspelt, is assumed
    to be the most frequent kind for its syntax: JSON for DeepSpeed, YAML for accelerate.
    """
    keys = {entry.key for entry in document.root.entries}
    switches = {
        entry.key
        for entry in document.root.entries
        if entry.key in ("bf16", "fp16") and not isinstance(entry.node, Entries)
    }
    is_yaml = document.format is Format.YAML
    default = FileKind.ACCELERATE if is_yaml else FileKind.DEEPSPEED
    known: dict[FileKind | str, set[str]] = {
        FileKind.DEEPSPEED: _names(schemas.deepspeed)
        - switches,  # sections in DeepSpeed's file, booleans in Trainer's
        FileKind.ACCELERATE: _names(schemas.accelerate),
        FileKind.RECIPE: _names(schemas.training_arguments) | set(_RECIPE_KEYS.split()),
    }
    if not is_yaml:
        known[FileKind.FSDP] = _fsdp_names(schemas)
    votes = {kind: len(keys & names) for kind, names in known.items()}
    best = max(votes, key=lambda kind: (votes[kind], kind is default))
    if keys and votes[best] < _LEAST_SHARE * len(keys) and not _is_misspelt(keys, known[default]):
        return _UNKNOWN
    return _IN_YAML if is_yaml and best is FileKind.DEEPSPEED else best


def _fsdp_names(schemas: Schemas) -> set[str]:
    """Return the keys of fsdp_config, and of accelerate's section that its authors may have in mind."""
    of_trainer = schemas.training_arguments.find("fsdp_config")
    of_accelerate = schemas.accelerate.find("fsdp_config")
    sections = [key.section for key in (of_trainer, of_accelerate) if key is not None and key.section]
    names = {name for section in sections for key in section.keys for name in (key.name, *key.aliases)}
    return names - {"version"}  # of many files


def _is_misspelt(keys: set[str], names: set[str]) -> bool:
    """Return True if more than half of a few keys are each similar to a name."""
    if len(keys) > len(names):
        return False
    near = [key for key in keys if get_close_matches(key, names, n=1, cutoff=0.8)]
    return 2 * len(near) > len(keys)


def _names(schema: Schema) -> set[str]:
    names = {name for key in schema.root.keys for name in (key.name, *key.aliases)}
    return names | {removed.path[0] for removed in schema.removed}
