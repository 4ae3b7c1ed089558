"""Rules on scripts: arguments passed by a launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import DEEPSPEED, Hit, Rule, Severity, declared, fails
from zerofit.checking.rules.script.hits import hit, unguarded_calls
from zerofit.core.command import Launcher
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation


_LOCAL_RANK = "--local_rank"


@Rule(
    id="script-must-take-local-rank",
    severity=Severity.ERROR,
    summary="the deepspeed launcher passes --local_rank to the script, which refuses it",
    why="parse_args() exits at an unknown argument",
    fix='add parser.add_argument("--local_rank", type=int), or launch with --no_local_rank',
    see=f"{DEEPSPEED}/launcher/launch.py",
    evidence=fails("unrecognized arguments: --local_rank"),
)
def _refuses_local_rank(situation: Situation) -> Iterator[Hit]:
    command, script = situation.command, situation.script
    if command is None or script is None or command.launcher is not Launcher.DEEPSPEED:
        return
    by = command.find("launcher")
    # Other multi-node launchers start the script themselves, without the argument.
    if command.find("no_local_rank", "no_python") or (by and by.value != "pdsh"):
        return
    for call in unguarded_calls(situation, Action.PARSE_STRICTLY):
        # argparse accepts a prefix of a longer option.
        takes = any(option == "**" or option.startswith(_LOCAL_RANK) for option in call.options)
        if not takes:
            yield hit(call.seen, f" without {_LOCAL_RANK}")


RULES = declared(vars())
