"""The model catalog zerofit/catalog/models.toml and its sizes, read without torch or transformers.

models.toml is maintained by hand: one table per model, with `hub_ids`, `source` (the config.json on the hub),
`checked` (what it was verified against), `published_parameters` if a count was published, `note` if the entry
differs from what is published, and `config`. model_sizes.toml is generated from it by transformers' own
classes (make catalog).
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zerofit.core.catalog_folder import CATALOG_FOLDER
from zerofit.models.source import ModelSizes
from zerofit.models.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogModel:
    """One model of the catalog."""

    name: str
    """The name that users type, such as "llama-3-8b"."""
    hub_ids: tuple[str, ...]
    """The hub repositories with this config, starting with its source."""
    source: str
    """Link to the config.json, for reference only."""
    checked: str
    """What the entry was verified against; the head of models.toml defines the terms."""
    config: dict[str, Any]
    """The keys of config.json that affect memory and computation."""
    published_parameters: int | None = None
    """The published parameter count; None if unknown."""
    note: str = ""
    """How and why the entry differs from what is published; empty otherwise."""


@cache
def catalog_models() -> dict[str, CatalogModel]:
    """Return every model of the catalog by name."""
    return {
        name: CatalogModel(
            name=name,
            hub_ids=tuple(entry["hub_ids"]),
            source=entry["source"],
            checked=entry["checked"],
            config=entry["config"] | dict.fromkeys(entry.get("nulls", ())),
            published_parameters=entry.get("published_parameters"),
            note=entry.get("note", ""),
        )
        for name, entry in _read("models.toml").items()
    }


def find_in_catalog(text: str) -> CatalogModel | None:
    """Return the model with a name, hub id or last part of one, ignoring case; None if there is none."""
    return _by_spelling().get(text.lower())


def nearest_in_catalog(text: str) -> tuple[str, ...]:
    """Return up to three catalog names similar to a misspelt one, best first."""
    word = text.lower().rpartition("/")[2]
    spellings = {spelling: model.name for spelling, model in _by_spelling().items() if "/" not in spelling}
    near = difflib.get_close_matches(word, spellings, n=9, cutoff=0.6)
    return tuple(dict.fromkeys(spellings[spelling] for spelling in near))[:3]


def catalog_sizes(name: str) -> dict[Task, ModelSizes]:
    """Return the sizes of one catalog model for each task that transformers has a class for."""
    heads = _read("model_sizes.toml")["models"][name]
    return {Task(task): ModelSizes(**sizes) for task, sizes in heads.items()}


@cache
def _by_spelling() -> dict[str, CatalogModel]:
    spellings = {}
    for model in catalog_models().values():
        for hub_id in model.hub_ids:
            spellings[hub_id.lower()] = model
            spellings.setdefault(hub_id.lower().rpartition("/")[2], model)
    return spellings | catalog_models()


@cache
def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(CATALOG_FOLDER) / name).read_text(encoding="utf-8"))
