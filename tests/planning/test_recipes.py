"""Recipes: each line is understood, fits where it says, and needs what was written of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.write_recipe_plans import plan_recipe
from zerofit.machine.gpu_catalog import catalog_gpu
from zerofit.machine.machine_spec import parse_gpus
from zerofit.models.catalog import catalog_models
from zerofit.planning.recipes import Recipe, Training, load_recipes

_RunZerofit = Callable[..., subprocess.CompletedProcess[str]]
_RECIPES = load_recipes()
_IDS = [recipe.id for recipe in _RECIPES]
_OFF_BY = 0.01
"""How far a plan may be from what was written: other releases of transformers trace a little more or less."""


def test_there_are_twelve_models_each_in_full_and_with_adapters() -> None:
    models = {recipe.model for recipe in _RECIPES}
    assert len(models) == 12
    assert models <= set(catalog_models())
    trainings = {model: {recipe.training for recipe in _RECIPES if recipe.model == model} for model in models}
    assert all({Training.FULL, Training.LORA} <= found for found in trainings.values())
    assert sum(Training.QLORA in found for found in trainings.values()) == 11
    assert len(set(_IDS)) == len(_IDS)


@pytest.mark.parametrize("recipe", _RECIPES, ids=_IDS)
def test_a_recipe_was_planned_and_fits_its_gpus(recipe: Recipe) -> None:
    gpus = parse_gpus(recipe.gpus)
    assert len(gpus) in (1, 8)
    assert catalog_gpu(gpus[0].name, gpus[0].memory_bytes) is not None
    assert recipe.planned is not None
    assert 0.1 * gpus[0].usable_bytes < recipe.planned.peak_bytes < gpus[0].usable_bytes


@pytest.mark.parametrize("training", Training)
def test_the_lines_are_understood(training: Training, run_zerofit: _RunZerofit, tmp_path: Path) -> None:
    """One of each kind: those of the others differ in names and numbers."""
    recipe = next(recipe for recipe in _RECIPES if recipe.training is training)
    done = run_zerofit(*recipe.plan_words[1:], "--fast", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)["plans"]
    strategy = (plan["chosen"] or plan["screen"]["rows"][0])["strategy"]
    assert (strategy["lora"] is not None, strategy["quantization"]) == (
        training is not Training.FULL,
        "nf4" if training is Training.QLORA else None,
    )
    (tmp_path / "train.py").write_text("raise SystemExit\n")
    launched = run_zerofit(
        *recipe.launch_words[1:-1],
        "--micro-batch-size",
        "4",
        "--no-capture",
        "--cpu",
        "--dry-run",
        "train.py",
        cwd=tmp_path,
    )
    assert launched.returncode == 0, launched.stderr
    adapts = "LoRA" in launched.stdout + launched.stderr or "adapter" in launched.stdout + launched.stderr
    assert adapts == (training is not Training.FULL)
    assert "no such option" not in launched.stderr.lower()


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, id=recipe.id) for recipe in _RECIPES],
)
def test_a_recipe_is_planned_as_was_written(recipe: Recipe) -> None:
    assert recipe.planned is not None
    planned = plan_recipe(recipe, is_fast=not recipe.planned.is_traced)
    assert planned is not None
    assert (planned.strategy, planned.batch) == (recipe.planned.strategy, recipe.planned.batch)
    assert planned.peak_bytes == pytest.approx(recipe.planned.peak_bytes, rel=_OFF_BY)


def test_recipes_are_listed_and_one_model_has_its_lines(run_zerofit: _RunZerofit, tmp_path: Path) -> None:
    listed = run_zerofit("recipes", cwd=tmp_path, environment={"COLUMNS": "200"})
    assert (listed.returncode, listed.stderr) == (0, "")
    assert [line.split()[:3] for line in listed.stdout.splitlines()[1 : 1 + len(_RECIPES)]] == [
        [recipe.model, recipe.training.value, recipe.gpus] for recipe in _RECIPES
    ]
    lines = run_zerofit("recipes", "llama-3.1-8b", cwd=tmp_path).stdout.splitlines()
    assert [line for line in lines if line.startswith("zerofit launch")] == [
        "zerofit launch --global-batch-size 16 train.py",
        "zerofit launch --global-batch-size 16 --lora --lora-targets all-linear train.py",
        "zerofit launch --global-batch-size 16 --qlora --lora-targets all-linear train.py",
    ]
    (first, *_) = json.loads(run_zerofit("recipes", "--json", cwd=tmp_path).stdout)
    assert first["id"] == _IDS[0]
    assert first["planned"]["peak_bytes"] > 0


def test_a_model_without_a_recipe_gets_the_nearest(run_zerofit: _RunZerofit, tmp_path: Path) -> None:
    done = run_zerofit("recipes", "llama-3.1-80b", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "error[recipe-unknown]: there is no recipe for this model"
    assert done.stderr.splitlines()[-1] == "  fix:   did you mean llama-3.1-8b?"
