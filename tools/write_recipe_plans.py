"""python -m tools.write_recipe_plans: plans each recipe, and writes what it needs into the catalog.

A quarter of an hour on two idle cores. Names of recipes ("llama-3.1-8b/qlora") plan those alone; `--fast`
plans those that have no numbers yet, by closed forms.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import sys
from pathlib import Path
from typing import Any

from zerofit.core.atomic_file import write_whole
from zerofit.core.strategy import Lora
from zerofit.planning.plan import plan
from zerofit.planning.recipes import (
    PLANS,
    PlannedRecipe,
    Recipe,
    Training,
    load_recipes,
    planned_of,
    planned_recipes,
)


def plan_recipe(recipe: Recipe, *, is_fast: bool = False) -> PlannedRecipe | None:
    """Return what a recipe needs; None if it does not fit.

    Args:
        recipe: of the catalog.
        is_fast: True for closed forms in place of a trace.
    """
    settings: dict[str, Any] = {}
    if recipe.training is not Training.FULL:
        settings["lora"] = Lora(target_modules=("all-linear",))
    if recipe.training is Training.QLORA:
        settings["quantization"] = "nf4"
    answer = plan(
        model=recipe.model,
        sequence_length=recipe.sequence_length,
        global_batch_size=recipe.global_batch_size,
        gpus=recipe.gpus,
        is_fast=is_fast,
        **settings,
    )
    return planned_of(answer)


def main() -> None:
    """Plan the named recipes, or all, and write each as soon as it is planned."""
    recipes = load_recipes()
    is_fast = "--fast" in sys.argv[1:]
    names = [word for word in sys.argv[1:] if word != "--fast"]
    if unknown := set(names) - {recipe.id for recipe in recipes}:
        sys.exit(f"no such recipes: {', '.join(sorted(unknown))}")
    for recipe in recipes:
        if (names and recipe.id not in names) or (is_fast and recipe.id in planned_recipes()):
            continue
        planned = plan_recipe(recipe, is_fast=is_fast)
        print(recipe.id, "does not fit" if planned is None else planned, flush=True)
        with open(__file__, encoding="utf-8") as lock:  # several processes may share the recipes
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = planned_recipes()
            known.pop(recipe.id, None)
            if planned is not None:
                known[recipe.id] = dataclasses.asdict(planned)
            kept = {each.id: known[each.id] for each in recipes if each.id in known}
            write_whole(Path(PLANS), json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
