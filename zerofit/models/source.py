"""The facts of a requested model: its config, facts and task head, and where they came from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.core.facts import ModelFacts
    from zerofit.models.task import Task


class ModelOrigin(Enum):
    """Where a model's config came from."""

    CATALOG = "catalog"
    FOLDER = "folder"
    FILE = "file"
    CACHE = "hub cache"
    HUB = "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of one model with one task head, in elements; each tied parameter counts once."""

    architecture: str
    """transformers' class with its task head."""
    num_parameters: int
    """All parameters."""
    num_trainable_parameters: int
    """Those that get gradients: fewer where a family fixes some, as Whisper its sinusoidal positions."""
    num_largest_layer_parameters: int
    """Parameters of the largest transformer block; 0 where it is not known."""
    largest_parameter: int
    """Elements of the largest single parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedConfig:
    """A config.json and where it was found."""

    name: str
    """The catalog name, folder, file or hub id."""
    config: dict[str, Any]
    """The content of config.json; of a catalog entry, the keys of it that shape memory and computation."""
    origin: ModelOrigin
    place: str
    """The folder, or the hub id: where remote code would be read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource(LocatedConfig):
    """A model as it was asked for, ready to be planned with or to be built without weights."""

    task: Task
    """The task of the head."""
    task_reason: str
    """Why this task, in words."""
    facts: ModelFacts
    trust_remote_code: bool = False
    """True if the user allowed the model's own Python code to run."""
    note: str = ""
    """Where a catalog entry differs from what is published, for the user to read; empty otherwise."""
