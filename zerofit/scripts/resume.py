"""ResumeWay: how a script resumes from a checkpoint, judged by its source and its capture."""

from __future__ import annotations

import ast
import tokenize
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.command import Route
from zerofit.core.errors import Unreadable
from zerofit.scripts.source.names import called_name
from zerofit.scripts.target import source_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.capture import Capture

_NAMES = ("resume_from_checkpoint", "resume_from", "resume_checkpoint", "resume")
"""Common arguments for a checkpoint: accelerate's and transformers' examples use the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeWay:
    """How a script resumes from a checkpoint."""

    is_by_trainer: bool = False
    """True if a Trainer resumes by train(resume_from_checkpoint=...)."""
    option: str | None = None
    """The script's own option for the checkpoint: "--resume_from_checkpoint"."""
    is_switch: bool = False
    """True if that option takes no value: the script finds the checkpoint itself."""
    loads_by_itself: bool = False
    """True if the script calls load_state() or get_last_checkpoint() without such an option."""
    is_unread: bool = False
    """True if the script was not run, and its source shows neither a way to resume nor what trains: another
    file has that, or it can't be read."""

    @property
    def is_known(self) -> bool:
        """True if there is any way to resume."""
        return self.is_by_trainer or self.option is not None or self.loads_by_itself

    def with_checkpoint(self, target: tuple[str, ...], checkpoint: Path) -> tuple[str, ...]:
        """Return a script and its arguments for resuming; unchanged if no argument is needed."""
        if self.option is None or self.is_by_trainer:
            return target
        name, kept, skips = self.option.replace("_", "-"), [], False
        for word in target:
            said = word.partition("=")[0].replace("_", "-")
            if skips:
                skips = False
            elif said == name:
                skips = "=" not in word and not self.is_switch
            else:
                kept.append(word)
        return (*kept, self.option, *(() if self.is_switch else (str(checkpoint),)))


def resume_way(capture: Capture | None, *, target: tuple[str, ...] | None = None) -> ResumeWay:
    """Return how a script resumes; no way if nothing shows one.

    Args:
        capture: of the script; None if it was not captured.
        target: the script and its arguments, whose source is read then.
    """
    target = target if capture is None else capture.target
    source = None if target is None else _source(target)
    route = _route(source) if capture is None else capture.route
    if route is Route.TRAINER:
        return ResumeWay(is_by_trainer=True)
    found = ResumeWay() if source is None else _way_in(source)
    is_unread = capture is None and route is None and not found.is_known
    return replace(found, is_unread=is_unread)


def _source(target: tuple[str, ...]) -> str | None:
    """Return the source that a target runs; None if it is in no file here, or can't be read."""
    path = source_file(target)
    try:
        if path is None:
            return None
        with tokenize.open(path) as file:  # in the encoding that it declares
            return file.read()
    except (OSError, SyntaxError, ValueError):
        return None


def _route(source: str | None) -> Route | None:
    """Return whose loop trains, by the source of a script that was not run; None if it does not show that."""
    from zerofit.scripts.source.read_script import read_script  # imports many modules

    try:
        return None if source is None else read_script(source, name="").route
    except Unreadable:
        return None


def _way_in(source: str) -> ResumeWay:
    """Return the way to resume in the source of a script that trains with its own loop."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ResumeWay()
    options = dict(_options(tree))
    for name in _NAMES:
        if name in options:
            option, is_switch = options[name]
            return ResumeWay(option=option, is_switch=is_switch)
    calls = {called_name(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return ResumeWay(loads_by_itself=bool(calls & {"load_state", "get_last_checkpoint"}))


def _options(tree: ast.AST) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Yield the name of each option, as written, and whether it is a switch.

    Options are those of argparse and click (`add_argument("--resume")`, `@click.option("--resume")`), and
    fields of classes, as for HfArgumentParser and others.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called_name(node) in ("add_argument", "option", "Option"):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            action = keywords.get("action")
            is_switch = "is_flag" in keywords or (
                isinstance(action, ast.Constant) and str(action.value).startswith("store_")
            )
            for argument in node.args:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                    text = str(argument.value)
                    yield text[2:].replace("-", "_"), (text, is_switch)
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    is_switch = isinstance(field.annotation, ast.Name) and field.annotation.id == "bool"
                    yield field.target.id, (f"--{field.target.id}", is_switch)
