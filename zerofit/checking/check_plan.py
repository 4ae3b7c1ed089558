"""Checks a plan and the script that it trains against the rules, before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.check_run import stop_at_errors
from zerofit.checking.inputs.capture import with_capture
from zerofit.checking.inputs.strategy import situation_of_launch
from zerofit.checking.script_files import script_file
from zerofit.checking.targets import Targets
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.core.overrides import NOTHING_SAID, Overrides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.core.plan import Plan


def check_plan(
    plan: Plan,
    *,
    script: str | None,
    arguments: Sequence[str],
    say: Callable[[str], object],
    said: Overrides = NOTHING_SAID,
) -> None:
    """Check that no compatibility rule forbids a run of a script under a plan.

    Args:
        plan: the plan; its `is_checked` tells whether an error ends the run.
        script: path of the script; None for a module, whose source is not read.
        arguments: the script's own.
        say: prints a finding that does not end the run.
        said: what the user set; findings name what is from a file by its line.

    Raises:
        ExceptionGroup: of one UserError for each finding that is an error.
    """
    # The checkpoint's ranks and stage are not checked, since the ranks convert it.
    targets = Targets(
        files=() if script is None else (script_file(script),),
        arguments=tuple(arguments),
        are_all_arguments=True,
        schemas=load_schemas(plan.versions),
    )
    situation = situation_of_launch(plan, machine=plan.machine, targets=targets, said=said)
    if plan.capture is not None:
        situation = with_capture(situation, plan.capture, is_launched=True)
    stop_at_errors(situation, no_check=not plan.is_checked, say=say)
