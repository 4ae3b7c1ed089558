"""Families of transformers' models and the classes in their code, without importing it."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from zerofit.core.catalog_folder import CATALOG_FOLDER

_NO_SPLIT = re.compile(r"_no_split_modules\s*=\s*\[([^\]]*)\]")
"""The blocks of a model, which FSDP and device_map keep whole."""
_QUOTED = re.compile(r"[\"'](\w+)[\"']")


@functools.cache
def _model_code() -> dict[str, str]:
    """Return the source of each family's models by the name of its folder; empty without transformers."""
    from importlib.util import find_spec

    found = find_spec("transformers")  # imports nothing
    folders = found.submodule_search_locations or [] if found else []
    files = (path for folder in folders for path in Path(folder).glob("models/*/modeling_*.py"))
    texts: dict[str, str] = {}
    for path in sorted(files):
        texts[path.parent.name] = texts.get(path.parent.name, "") + path.read_text(encoding="utf-8")
    return texts


def families_with_class(name: str) -> tuple[str, ...] | None:
    """Return the families of models whose code defines a class; None if transformers is not installed."""
    code = _model_code()
    return tuple(family for family, text in code.items() if f"\nclass {name}(" in text) if code else None


def is_in_code_of(name: str, family: str) -> bool | None:
    """Return True if the code of a family of models has a name; None if there is no such family."""
    text = _model_code().get(family.replace("-", "_"))
    return None if text is None else re.search(rf"\b{re.escape(name)}\b", text) is not None


def block_classes(family: str = "") -> tuple[str, ...]:
    """Return the classes in _no_split_modules: those of a family of models, or of all."""
    texts = [_model_code().get(family.replace("-", "_"), "")] if family else _model_code().values()
    lists = (found for text in texts for found in _NO_SPLIT.findall(text))
    return tuple(dict.fromkeys(name for names in lists for name in _QUOTED.findall(names)))


def family_of(name: str) -> str | None:
    """Return a model's family, "llama": off its folder's config.json, or by its name in the catalog."""
    path = Path(name, "config.json")
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return None if path.exists() else _catalog().get(name.lower())


@functools.cache
def _catalog() -> dict[str, str]:
    """Return the families of the catalog's models by each of their names, in lower case."""
    import tomllib  # imported only if needed, since it takes time

    models: dict[str, dict[str, Any]] = tomllib.loads(
        Path(CATALOG_FOLDER, "models.toml").read_text(encoding="utf-8")
    )
    return {
        name.lower(): str(entry["config"]["model_type"])
        for key, entry in models.items()
        for name in (key, *entry.get("hub_ids", ()))
        if "model_type" in entry.get("config", {})
    }
