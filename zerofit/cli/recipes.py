"""zerofit recipes: launch lines for models that are often fine-tuned, and what each needs."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

import click

from zerofit.cli.completion import complete_model
from zerofit.cli.output.console import echo, terminal_width
from zerofit.cli.parameters import CONTEXT, Verb
from zerofit.cli.shared_options import json_option
from zerofit.core.errors import UserError, nearest
from zerofit.core.text_table import table_lines
from zerofit.planning.plan_labels import gib, seconds
from zerofit.planning.recipes import PlannedRecipe, Recipe, load_recipes

_HEADER = ("model", "trains", "GPUs", "GiB", "step", "strategy", "batch")
_LESS_IMPORTANT = (6, 4, 5)
"""Columns that narrow terminals leave out."""


@click.command(cls=Verb, context_settings=CONTEXT)
@json_option
@click.argument("model", required=False, shell_complete=complete_model)
def recipes(*, model: str | None, as_json: bool) -> None:
    """List launch lines for models that are often fine-tuned, with the memory that each needs.

    With MODEL, the lines of that model to paste.
    """
    found = load_recipes()
    if model is not None:
        found = tuple(recipe for recipe in found if recipe.model == model)
        if not found:
            raise _no_recipe(model)
    if as_json:
        echo(json.dumps([_fields(recipe) for recipe in found], indent=2))
    elif model is None:
        rows = [_HEADER, *map(_row, found)]
        echo("\n".join(table_lines(rows, width=terminal_width(), leaves_out=_LESS_IMPORTANT)))
        if not all(recipe.planned and recipe.planned.is_traced for recipe in found):
            echo("\n~: by closed forms, roughly; the others by a trace of the model")
        echo("\nGPUs are common ones on which training is fast; README has the smallest that hold each model")
        echo("the lines of one: zerofit recipes MODEL")
    else:
        echo("\n\n".join(map(_lines, found)))


def _fields(recipe: Recipe) -> dict[str, Any]:
    return {
        "id": recipe.id,
        **dataclasses.asdict(recipe),
        "plan": shlex.join(recipe.plan_words),
        "launch": shlex.join(recipe.launch_words),
    }


def _row(recipe: Recipe) -> tuple[str, ...]:
    planned = recipe.planned
    needs = ("-", "-", "-", "-")
    if planned is not None:
        needs = (_memory(planned), _time(planned), planned.strategy, planned.batch)
    return recipe.model, recipe.training.value, recipe.gpus, *needs


def _memory(planned: PlannedRecipe) -> str:
    about = "" if planned.is_traced else "~"
    return f"{about}{gib(planned.peak_bytes)} ±{planned.uncertainty:.0%}"


def _time(planned: PlannedRecipe) -> str:
    if planned.step_time_s is None or planned.step_time_uncertainty is None or not planned.is_traced:
        return "-"
    return f"{seconds(planned.step_time_s)} ±{planned.step_time_uncertainty:.0%}"


def _lines(recipe: Recipe) -> str:
    """Return what a recipe needs, and its lines."""
    said = f"# {recipe.model}, {recipe.training.value}, on {recipe.gpus}"
    if recipe.planned is not None:
        planned = recipe.planned
        said += f": {planned.strategy}, batch {planned.batch}, {_memory(planned)} GiB on each GPU"
        said += f", {_time(planned)} a step of {recipe.global_batch_size} x {recipe.sequence_length} tokens"
    return "\n".join((said, shlex.join(recipe.plan_words), shlex.join(recipe.launch_words)))


def _no_recipe(model: str) -> UserError:
    known = tuple(dict.fromkeys(recipe.model for recipe in load_recipes()))
    near = nearest(model, known)
    return UserError(
        "recipe-unknown",
        "there is no recipe for this model",
        found=model,
        why=f"there are recipes for {', '.join(known)}",
        fix=f"did you mean {near}?" if near else "plan it: zerofit plan --model MODEL --gpus SPEC",
    )
