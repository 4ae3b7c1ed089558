"""Rules on scripts: states that only one rank saves or loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import launch_of, launch_value
from zerofit.checking.inputs.fsdp_run import fsdp_of
from zerofit.checking.rule import ACCELERATE, DIFFERS, HANGS, Hit, Rule, Severity, declared, ignored
from zerofit.checking.rules.script.hits import hit_under_condition, is_without_deepspeed, unguarded_calls
from zerofit.core.command import Launcher
from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import ScriptCall


_SHARDED = ("FSDP", "MEGATRON_LM")
_SHARDED_FLAGS = ("use_fsdp", "use_megatron_lm")
_NAMES_THEM = "project.automatic_checkpoint_naming"
_DOCS = "https://huggingface.co/docs/accelerate/v1.15.0/usage_guides/checkpoint"


@Rule(
    id="save-state-needs-all-ranks",
    severity=Severity.ERROR,
    summary="save_state() has to be called by every rank",
    why="it waits for the other ranks, and they never come",
    fix="move it out of the condition: save_state() itself writes shared files on the main rank only",
    see=_DOCS,
    evidence=HANGS,
)
def _saves_on_one_rank(situation: Situation) -> Iterator[Hit]:
    if fsdp_of(situation) is not None:
        return  # fsdp-checkpoint-needs-all-ranks
    for call in _on_one_rank(situation, Action.SAVE_STATE):
        waits = _waiting(situation)
        if waits is not None and is_without_deepspeed(situation):
            yield hit_under_condition(call, more=f", with {waits.text}")


@Rule(
    id="save-state-loses-random-states",
    severity=Severity.ADVICE,
    summary="save_state() on one rank saves the random states of that rank only",
    why="every rank writes its own, and without them it draws other random numbers after load_state(); the "
    "others also wait for a long save in their next collective, which may time out",
    fix="move save_state() out of the condition: it writes shared files on the main rank only",
    see=f"{ACCELERATE}/checkpointing.py",
    evidence=ignored(("left random_states_1.pkl", "not observed")),
)
def _loses_random_states(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or not script.loads_states or not is_without_deepspeed(situation):
        return
    for call in _on_one_rank(situation, Action.SAVE_STATE):
        ranks, is_launched = situation.topology, situation.launcher not in (None, Launcher.PYTHON)
        confidence = Confidence.LIKELY if ranks is not None else Confidence.POSSIBLE
        may_be_several = is_launched if ranks is None else ranks.world_size > 1
        if _waiting(situation) is None and may_be_several:
            yield hit_under_condition(call, confidence)


@Rule(
    id="load-state-needs-all-ranks",
    severity=Severity.ERROR,
    summary="load_state() has to be called by every rank",
    why="the other ranks go on with weights and optimizer states of their own, and nothing makes them equal "
    "again; sharded engines hang",
    fix="move it out of the condition",
    see=_DOCS,
    evidence=DIFFERS,
)
def _loads_on_one_rank(situation: Situation) -> Iterator[Hit]:
    for call in _on_one_rank(situation, Action.LOAD_STATE):
        yield hit_under_condition(call)


def _on_one_rank(situation: Situation, action: Action) -> Iterator[ScriptCall]:
    return (call for call in unguarded_calls(situation, action) if call.one_rank is not None)


def _waiting(situation: Situation) -> Said[object] | None:
    """Return the setting with which save_state() waits for all ranks; None if none is known to."""
    script, launch = situation.script, launch_of(situation)
    for keyword in script.accelerator_keywords if script else ():
        if keyword.name == _NAMES_THEM and keyword.value is True:
            return keyword.said
    if launch is None:
        return None
    flag = launch.command.find(*_SHARDED_FLAGS) if launch.command else None
    if flag is not None:
        return Said(value=True, text=flag.text)
    kind = launch_value(launch, "distributed_type")
    return kind if kind is not None and kind.value in _SHARDED else None


RULES = declared(vars())
