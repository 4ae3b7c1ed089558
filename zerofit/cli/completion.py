"""Completion in the shell of scripts, files and names, for `shell_complete` of click's parameters."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import click

    Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_COUNT = re.compile(r"(?:.*,)?(?:\d+\s*x)?", re.IGNORECASE)
"""What precedes a GPU's name in --gpus."""


def complete_script(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the Python files and folders that a path may continue with."""
    folder, name = os.path.split(typed)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    entries = [entry for entry in entries if entry.name.startswith(name) and (name or entry.name[0] != ".")]
    scripts = [entry.name for entry in entries if entry.name.endswith(".py") and entry.is_file()]
    if not scripts:  # the shell's own completion of folders adds no space after the only one
        return [CompletionItem(typed, type="dir")]
    folders = [f"{entry.name}/" for entry in entries if entry.is_dir()]
    return [CompletionItem(os.path.join(folder, script)) for script in (*scripts, *folders)]


def complete_file(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Let the shell complete a file."""
    return [CompletionItem(typed, type="file")]


def complete_gpus(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the catalog's GPUs, after their number if there is one."""
    from zerofit.machine.gpu_catalog import load_gpus

    match = _COUNT.match(typed)
    before = match.group() if match else ""
    return matching((gpu.name for gpu in load_gpus()), typed.removeprefix(before), before)


def complete_model(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the catalog's models, or else let the shell complete a file."""
    from zerofit.models.catalog import catalog_models

    return matching(catalog_models(), typed) or complete_file(context, parameter, typed)


def complete_words(words: Iterable[str]) -> Complete:
    """Return the completion of an option that takes one of some words."""
    known = tuple(words)
    return lambda context, parameter, typed: matching(known, typed)


def complete_run(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the runs of --run-dir, the newest first."""
    runs = Path(context.params.get("run_dir") or "zerofit-runs")
    names = sorted((plan.parent.name for plan in runs.glob("*/plan.json")), reverse=True)
    return matching(names, typed)


def matching(words: Iterable[str], typed: str, before: str = "") -> list[CompletionItem]:
    """Return the words that begin as typed, ignoring case."""
    return [CompletionItem(before + word) for word in words if word.lower().startswith(typed.lower())]
