"""ModelSource: a requested model's config, facts and task head, and their origin."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.core.facts import ModelFacts
    from zerofit.models.task import Task


class ModelOrigin(Enum):
    """The source of a model's config."""

    CATALOG = "catalog"
    FOLDER = "folder"
    FILE = "file"
    CACHE = "hub cache"
    HUB = "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of one model with one task head, in elements; tied parameters count once."""

    architecture: str
    """transformers' class with its task head."""
    num_parameters: int
    """All parameters."""
    num_trainable_parameters: int
    """Parameters with gradients; fewer if a family has fixed ones, such as Whisper's sinusoidal positions."""
    num_largest_layer_parameters: int
    """Parameters of the largest transformer block; 0 if unknown."""
    largest_parameter: int
    """Elements of the largest single parameter."""
    num_blocks: int = field(default=0, compare=False)
    """Members of the longest list of blocks, counted on the built model; 0 if it was not built."""
    can_checkpoint: bool = field(default=True, compare=False)
    """False if the class was built and does not support gradient checkpointing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedConfig:
    """A config.json and where it was found."""

    name: str
    """The catalog name, folder, file or hub id."""
    config: dict[str, Any]
    """The content of config.json; for a catalog entry, only keys that affect memory and computation."""
    origin: ModelOrigin
    place: str
    """The folder or the hub id that custom code would be read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource(LocatedConfig):
    """A requested model, ready to be planned for or built without weights."""

    task: Task
    """The task of the head."""
    task_reason: str
    """Why this task was chosen, in words."""
    facts: ModelFacts
    trust_remote_code: bool = False
    """True if the user allowed the model's own Python code to run."""
    can_checkpoint: bool = True
    """False if its class does not support gradient checkpointing."""
    note: str = ""
    """How a catalog entry differs from what is published, for the user; empty otherwise."""
