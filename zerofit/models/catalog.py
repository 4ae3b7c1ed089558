"""The models of zerofit/catalog/models.toml and their sizes, read without torch or transformers.

models.toml is kept by hand: one table a model, with `hub_ids`, `source` (the config.json on the hub),
`checked` (what it was held against), `published_parameters` where a count was published, `note` where the
entry differs from what is published, and `config`. model_sizes.toml is generated from it by transformers' own
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
    """The repositories on the hub that have this config, the one it was taken from first."""
    source: str
    """Link to the config.json, which was not opened."""
    checked: str
    """The source that the entry was checked against; the head of models.toml explains the words."""
    config: dict[str, Any]
    """The keys of config.json that decide the model's memory and computation."""
    published_parameters: int | None = None
    """The parameter count as published; None where none is known."""
    note: str = ""
    """Where the entry differs from what is published, and why; empty otherwise."""


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
    """Return the model of a name, a hub id or the last part of one, in any case; None without one."""
    return _by_spelling().get(text.lower())


def nearest_in_catalog(text: str) -> tuple[str, ...]:
    """Return up to three names of the catalog that a misspelt one resembles, best first."""
    word = text.lower().rpartition("/")[2]
    spellings = {spelling: model.name for spelling, model in _by_spelling().items() if "/" not in spelling}
    near = difflib.get_close_matches(word, spellings, n=9, cutoff=0.6)
    return tuple(dict.fromkeys(spellings[spelling] for spelling in near))[:3]


def catalog_sizes(name: str) -> dict[Task, ModelSizes]:
    """Return the sizes of one model of the catalog for each task that transformers has a class for."""
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
