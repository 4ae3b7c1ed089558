"""The form of an error: what happened, what was found, why, what to do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from zerofit.core.errors import UserError, format_message, nearest


def test_error_is_a_headline_and_one_line_a_part() -> None:
    error = UserError(
        "param-offload-needs-zero3",
        "parameter offload needs ZeRO-3",
        found="offload_param.device=cpu with zero_optimization.stage=2   (ds_config.json:7)",
        why="only stage 3 partitions parameters",
        fix="set zero_optimization.stage to 3, or remove offload_param",
        see="https://www.deepspeed.ai/docs/config-json/#parameter-offloading",
    )
    assert str(error) == (
        "error[param-offload-needs-zero3]: parameter offload needs ZeRO-3\n"
        "  found: offload_param.device=cpu with zero_optimization.stage=2   (ds_config.json:7)\n"
        "  why:   only stage 3 partitions parameters\n"
        "  fix:   set zero_optimization.stage to 3, or remove offload_param\n"
        "  see:   https://www.deepspeed.ai/docs/config-json/#parameter-offloading"
    )


def test_without_more_an_error_has_no_see_line_and_is_one_of_usage() -> None:
    parts = {"found": "F", "why": "W", "fix": "X"}
    error = UserError("id", "summary", **parts)
    assert str(error) == "error[id]: summary\n  found: F\n  why:   W\n  fix:   X"
    assert error.exit_code == 2
    assert UserError("id", "summary", **parts, exit_code=1).exit_code == 1


def test_warning_has_the_same_form() -> None:
    text = format_message("warning[id]: summary", found="F", why="W", fix="X", see="S")
    assert text == "warning[id]: summary\n  found: F\n  why:   W\n  fix:   X\n  see:   S"


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--zero-stag", "--zero-stage"),
        ("--zerostage", "--zero-stage"),
        ("--offload-optimiser", "--offload-optimizer"),
        ("--preset", "--preset"),
        ("--xyz", None),
        ("", None),
    ],
)
def test_nearest_word(word: str, near: str | None) -> None:
    assert nearest(word, ["--zero-stage", "--offload-optimizer", "--preset"]) == near


def test_swapped_letters_are_the_most_likely_mistake() -> None:
    assert nearest("--modle", ["--module", "--model"]) == "--model"


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("main_training_ip", "main_process_ip"),
        ("main_training_port", "main_process_port"),
        ("main_training_func", "main_training_function"),
        ("main_process_addr", "main_process_port"),
        ("num_process", "num_processes"),
        ("per_device_batch_size", "per_device_train_batch_size"),
        ("other_training_thing", None),
    ],
)
def test_the_last_word_of_a_name_says_what_it_is(word: str, near: str | None) -> None:
    names = ("main_process_ip", "main_process_port", "main_training_function", "num_processes")
    assert nearest(word, (*names, "per_device_train_batch_size", "machine_rank")) == near


def test_nearest_of_no_words_is_none() -> None:
    assert nearest("word", iter(())) is None


ROOT = Path(__file__).parents[2] / "zerofit"


@pytest.mark.parametrize("folder", ["models/changes", "models/trace", "training"])
def test_what_a_strategy_does_is_not_reported_as_a_flag(folder: str) -> None:
    """A strategy may come from the planner, a plan file or a script's own lines: nobody typed its flags."""
    flags = [
        f"{path.relative_to(ROOT)}:{text.lineno}: {text.value}"
        for path in (ROOT / folder).rglob("*.py")
        for keyword in ast.walk(ast.parse(path.read_text()))
        if isinstance(keyword, ast.keyword) and keyword.arg == "found"
        for text in ast.walk(keyword.value)
        if isinstance(text, ast.Constant) and "--" in str(text.value)
    ]
    assert flags == []
