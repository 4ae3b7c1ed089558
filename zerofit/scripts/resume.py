"""ResumeWay: how a script resumes from a checkpoint, judged by its source and its capture."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.command import Route
from zerofit.scripts.source.names import called_name
from zerofit.scripts.target import script_of

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
    """Return how a script resumes; an unknown way if nothing shows it.

    Args:
        capture: of the script; None if it was not captured.
        target: the script and its arguments, which is read then.
    """
    if capture is not None and capture.route is Route.TRAINER:
        return ResumeWay(is_by_trainer=True)
    target = target if capture is None else capture.target
    if target is None:
        return ResumeWay()
    try:
        tree = ast.parse(Path(script_of(target)).read_bytes())
    except (OSError, SyntaxError, ValueError):
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
