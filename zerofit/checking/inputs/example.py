"""The files of a rule's Example."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerofit.configs.document import Format

if TYPE_CHECKING:
    from zerofit.checking.rule import Example

DEEPSPEED_FILE = "ds_config.json"
ACCELERATE_FILE = "accelerate.yaml"
SCRIPT_FILE = "train.py"


def example_files(example: Example) -> dict[str, str]:
    """Return the text of each file of an example, by name."""
    files = {}
    if example.deepspeed is not None:
        files[DEEPSPEED_FILE] = _text(example.deepspeed, Format.JSON)
    if example.accelerate is not None:
        files[ACCELERATE_FILE] = _text(example.accelerate, Format.YAML)
    if example.script is not None:
        files[SCRIPT_FILE] = example.script
    return files


def _text(content: Mapping[str, Any] | str, format: Format) -> str:  # noqa: A002 - the field's word
    if isinstance(content, str):
        return content
    if format is Format.JSON:
        return json.dumps(content, indent=2) + "\n"
    import yaml

    return str(yaml.safe_dump(dict(content), sort_keys=False))
