"""Recipes: launch lines for models that are often fine-tuned, each with what it is planned to need."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from zerofit.core.catalog_folder import CATALOG_FOLDER
from zerofit.planning.plan_labels import batch, label

if TYPE_CHECKING:
    from zerofit.planning.solve import Answer

RECIPES = os.path.join(CATALOG_FOLDER, "recipes.toml")
PLANS = os.path.join(CATALOG_FOLDER, "recipe_plans.json")


class Training(StrEnum):
    """What is trained of a model."""

    FULL = "full"
    """All weights."""
    LORA = "lora"
    """Adapters in all linear layers."""
    QLORA = "qlora"
    """Adapters, on weights in 4 bits."""


FLAGS = {
    Training.FULL: (),
    Training.LORA: ("--lora", "--lora-targets", "all-linear"),
    Training.QLORA: ("--qlora", "--lora-targets", "all-linear"),
}
"""Of plan and launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRecipe:
    """What a recipe is planned to need."""

    strategy: str
    """In a few words."""
    batch: str
    """Micro-batch and accumulation: "1 x 16"."""
    peak_bytes: int
    """Of each GPU."""
    uncertainty: float
    """Of it, relative."""
    step_time_s: float | None
    step_time_uncertainty: float | None
    is_traced: bool = True
    """False if by closed forms, as `plan --fast` does: it fits within their error too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model, what is trained of it, and on which GPUs."""

    model: str
    """A name of the catalog."""
    training: Training
    gpus: str
    """As --gpus takes them."""
    sequence_length: int
    global_batch_size: int
    planned: PlannedRecipe | None
    """None until `tools.write_recipe_plans` has planned it."""

    @property
    def id(self) -> str:
        """Its name: "llama-3.1-8b/qlora"."""
        return f"{self.model}/{self.training.value}"

    @property
    def plan_words(self) -> tuple[str, ...]:
        """The command that plans it, on any machine."""
        return (
            *("zerofit", "plan", "--gpus", self.gpus, "--model", self.model),
            *("--seq-len", str(self.sequence_length), "--global-batch-size", str(self.global_batch_size)),
            *FLAGS[self.training],
        )

    @property
    def launch_words(self) -> tuple[str, ...]:
        """The command that trains it there, with a script of one's own."""
        size = ("--global-batch-size", str(self.global_batch_size))
        return ("zerofit", "launch", *size, *FLAGS[self.training], "train.py")


@cache
def load_recipes() -> tuple[Recipe, ...]:
    """Return every recipe, the smallest model first."""
    with open(RECIPES, "rb") as file:
        entries = tomllib.load(file)["recipe"]
    plans = planned_recipes()
    found = []
    for entry in entries:
        for training in Training:
            if training.value in entry:
                id_ = f"{entry['model']}/{training.value}"
                found.append(
                    Recipe(
                        model=entry["model"],
                        training=training,
                        gpus=entry[training.value],
                        sequence_length=entry["sequence_length"],
                        global_batch_size=entry["global_batch_size"],
                        planned=PlannedRecipe(**plans[id_]) if id_ in plans else None,
                    )
                )
    return tuple(found)


def planned_recipes() -> dict[str, Any]:
    """Return what was written of each recipe, by its id; empty before the first time."""
    if not os.path.exists(PLANS):
        return {}
    with open(PLANS, encoding="utf-8") as file:
        plans: dict[str, Any] = json.load(file)
    return plans


def planned_of(answer: Answer) -> PlannedRecipe | None:
    """Return what is kept of a recipe's plan; None if nothing surely fits."""
    if not answer.fits or answer.found.chosen is None:
        return None
    strategy, estimate = answer.found.chosen.strategy, answer.found.chosen.estimate
    step_time = estimate.step_time
    return PlannedRecipe(
        strategy=label(strategy, answer.problem.topology),
        batch=batch(strategy),
        peak_bytes=estimate.device.peak_bytes,
        uncertainty=round(estimate.device.uncertainty, 4),
        step_time_s=None if step_time is None else float(f"{step_time.seconds:.4g}"),
        step_time_uncertainty=None if step_time is None else round(step_time.uncertainty, 4),
        is_traced=answer.screen is None,
    )
