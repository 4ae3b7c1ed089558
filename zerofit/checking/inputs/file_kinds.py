"""The kind of a file by its name and keys: a DeepSpeed or accelerate configuration, or something else."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from zerofit.configs.document import Entries, FileKind, Format

if TYPE_CHECKING:
    from zerofit.configs.document import Document
    from zerofit.configs.schema import Schema, Schemas

_IN_YAML = "a DeepSpeed configuration in YAML, which DeepSpeed does not read"
_UNKNOWN = "something else: none of its keys is one of DeepSpeed's or accelerate's, or near to one"
_LEAST_SHARE = 0.1
"""ASSUMPTION: of a configuration's keys, at least so many are known. In the real one with the fewest, where
all settings of a model stand beside DeepSpeed's, it is a fifth."""
_ARGUMENTS = "arguments of Trainer, or a training recipe"
_RECIPE_KEYS = """
    base_model cutoff_len dataset datasets dataset_name finetuning_type lora_alpha lora_r lora_rank
    model_name_or_path num_epochs sequence_len stage template
"""
"""Keys of LLaMA-Factory's, Axolotl's and TRL's recipes, beside those of TrainingArguments."""
_FORMATS = {
    "json": Format.JSON,
    "jsonc": Format.JSON,
    "json5": Format.HJSON,
    "hjson": Format.HJSON,
    "yaml": Format.YAML,
    "yml": Format.YAML,
}


def format_of(name: str, text: str) -> Format | None:
    """Return the language of a configuration, by its suffix, or by how it begins; None for another file."""
    is_json = text.lstrip("\ufeff \t\r\n").startswith("{")
    for suffix in reversed(name.rpartition("/")[2].split(".")[1:]):  # ds_config.json.template is JSON
        if suffix.lower() in _FORMATS:
            # DeepSpeed reads JSON whatever the name says, and some name it .yaml.
            return Format.JSON if is_json else _FORMATS[suffix.lower()]
    return Format.JSON if is_json else None


def kind_of(document: Document, schemas: Schemas) -> FileKind | str:
    """Return what a document is, or in a few words what it looks like where it is nothing to check.

    Keys decide, as a suffix says nothing. A file without any key, or whose every key is misspelt, is taken
    for what its language is most often used for: JSON for DeepSpeed, YAML for accelerate.
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
        FileKind.DEEPSPEED: _names(schemas.deepspeed) - switches,  # sections there, booleans for Trainer
        FileKind.ACCELERATE: _names(schemas.accelerate),
        _ARGUMENTS: _names(schemas.training_arguments) | set(_RECIPE_KEYS.split()),
    }
    votes = {kind: len(keys & names) for kind, names in known.items()}
    best = max(votes, key=lambda kind: (votes[kind], kind is default))
    if keys and votes[best] < _LEAST_SHARE * len(keys) and not _is_misspelt(keys, known[default]):
        return _UNKNOWN
    return _IN_YAML if is_yaml and best is FileKind.DEEPSPEED else best


def _is_misspelt(keys: set[str], names: set[str]) -> bool:
    """Return True if half of a few keys are each near to a name."""
    if len(keys) > len(names):
        return False
    near = [key for key in keys if get_close_matches(key, names, n=1, cutoff=0.8)]
    return 2 * len(near) >= len(keys)


def _names(schema: Schema) -> set[str]:
    names = {name for key in schema.root.keys for name in (key.name, *key.aliases)}
    return names | {removed.path[0] for removed in schema.removed}
