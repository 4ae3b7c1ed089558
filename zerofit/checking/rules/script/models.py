"""Rules on scripts: arguments with which models are loaded, and attributes of prepared ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.inputs.fsdp_run import fsdp_of
from zerofit.checking.rule import Rule, Severity, declared, fails
from zerofit.checking.rules.script.hits import hit, is_without_deepspeed, unguarded_calls
from zerofit.core.command import Route
from zerofit.core.setting import Confidence
from zerofit.core.strategy import Engine
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.rule import Hit
    from zerofit.checking.situation import Situation

_FLAGS = ("load_in_4bit", "load_in_8bit")


@Rule(
    id="load-in-bits-needs-config",
    severity=Severity.ERROR,
    summary="from_pretrained() takes no load_in_4bit and no load_in_8bit",
    why="transformers 5 only reads them from a quantization_config, and hands the argument on to the model, "
    "which refuses it",
    fix="pass quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    see="https://github.com/huggingface/transformers/blob/main/MIGRATION_GUIDE_V5.md",
    evidence=fails("got an unexpected keyword argument 'load_in_4bit'"),
    holds_for=("transformers>=5",),
)
def _loads_in_bits(situation: Situation) -> Iterator[Hit]:
    for call in situation.script.find(Action.MAKE_MODEL) if situation.script else ():
        for flag in _FLAGS:
            if flag in call.given:
                confidence = Confidence.CERTAIN if call.is_in_each_run else Confidence.LIKELY
                shown = "" if flag in call.seen.text else f" with {flag}"
                fix = f"pass quantization_config=BitsAndBytesConfig({flag}=True)"
                yield replace(hit(call.seen, shown, confidence), fix=fix)


@Rule(
    id="prepared-model-hides-attributes",
    severity=Severity.ERROR,
    summary="on several ranks a prepared model has no methods and attributes of its own",
    why="prepare() then returns torch's DistributedDataParallel, which only forwards the call itself",
    fix="write accelerator.unwrap_model(model) before it",
    see="https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
    evidence=fails("'DistributedDataParallel' object has no attribute"),
)
def _hidden_attributes(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or script.route is not Route.ACCELERATE or not script.find(Action.BACKWARD):
        return
    ranks = situation.topology
    if (ranks is not None and ranks.world_size == 1) or not _wraps_plainly(situation):
        return
    told = set[str]()
    for call in unguarded_calls(situation, Action.USE_WRAPPED):
        if call.seen.text in told:
            continue
        told.add(call.seen.text)
        model, _, name = call.seen.text.rpartition(".")
        confidence = Confidence.CERTAIN if call.is_in_each_run else Confidence.LIKELY
        found = f" with {ranks.world_size} ranks" if ranks is not None else " of a prepared model"
        fix = f"write accelerator.unwrap_model({model}).{name}"
        yield replace(hit(call.seen, found, Confidence.POSSIBLE if ranks is None else confidence), fix=fix)


def _wraps_plainly(situation: Situation) -> bool:
    """Return True unless DeepSpeed or FSDP may take the model, whose wrappers forward its attributes."""
    engine, script = situation.settings.engine, situation.script
    if engine is not None and engine.value is not Engine.NATIVE:
        return False
    makes = script.find(Action.MAKE_ACCELERATOR) if script is not None else ()
    is_open = any(
        call.given & {"fsdp_plugin", "megatron_lm_plugin", "parallelism_config", "**"} for call in makes
    )
    command = situation.command
    is_unread = (
        command is not None and command.find("config_file") is not None and situation.accelerate is None
    )
    return is_without_deepspeed(situation) and fsdp_of(situation) is None and not (is_open or is_unread)


RULES = declared(vars())
