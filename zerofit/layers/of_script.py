"""What a script's arguments and its source come to: its TrainingArguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.command import Route
from zerofit.layers.training_arguments import read_training_arguments
from zerofit.script_words import Action

if TYPE_CHECKING:
    from zerofit.script_facts import ScriptFacts
    from zerofit.targets import Targets
    from zerofit.trainer_settings import TrainerSettings


def trainer_of(script: ScriptFacts | None, route: Route | None, targets: Targets) -> TrainerSettings | None:
    """Return what is known of TrainingArguments; None where no Trainer runs, or nothing names its fields."""
    if route is not Route.TRAINER or targets.schemas is None:
        return None
    return read_training_arguments(
        fields=targets.schemas.training_arguments.root,
        arguments=targets.arguments,
        keywords=script.training_arguments if script else (),
        script=script.name if script else "",
        made=script.find(Action.MAKE_ARGUMENTS) if script else (),
    )
