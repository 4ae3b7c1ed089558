"""Rules of who chooses the number format: the launcher, Accelerator() and the DeepSpeed file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.launch_values import launch_of
from zerofit.checking.rule import Evidence, Example, Hit, Outcome, Rule, Severity
from zerofit.configs.quote import say
from zerofit.core.command import Route
from zerofit.core.setting import Place, Said

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation

_PLUGIN = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py"
_OTHER = {"bf16": "fp16", "fp16": "bf16"}


def _asked(situation: Situation) -> Said[str] | None:
    """Return the half precision that a flag or Accelerator(...) asks for; the script wins."""
    if situation.route is not Route.ACCELERATE:
        return None
    script = situation.script
    for keyword in script.accelerator_keywords if script else ():
        if script is not None and keyword.name == "mixed_precision" and isinstance(keyword.value, str):
            return Said(
                value=keyword.value,
                text=f"Accelerator({keyword.text})",
                place=Place(file=script.name, line=keyword.line, column=keyword.column),
                confidence=keyword.confidence,
            )
    launch = launch_of(situation)
    flag = launch.command.find("mixed_precision") if launch and launch.command else None
    return Said(value=flag.value, text=flag.text) if flag is not None and flag.value else None


def _turned_off(situation: Situation) -> Iterator[Hit]:
    asked, file = _asked(situation), situation.deepspeed
    if asked is None or file is None or asked.value not in _OTHER:
        return
    if file.value(asked.value, "enabled") is False and not _is_on(situation, _OTHER[asked.value]):
        yield _hit(situation, asked, asked.value)


def _opposite(situation: Situation) -> Iterator[Hit]:
    asked = _asked(situation)
    if asked is not None and asked.value in _OTHER and _is_on(situation, _OTHER[asked.value]):
        yield _hit(situation, asked, _OTHER[asked.value])


def _is_on(situation: Situation, name: str) -> bool:
    return situation.deepspeed is not None and situation.deepspeed.value(name, "enabled") is True


def _hit(situation: Situation, asked: Said[str], section: str) -> Hit:
    file = situation.deepspeed
    entry = file.at(section, "enabled") if file else None
    told = say(file, section, "enabled") if file else ""
    return Hit(
        found=f"{asked.text} with {told}",
        place=file.place(entry.key_span) if file and entry else asked.place,
        confidence=asked.confidence,
    )


_ZERO2: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
}
_NAMED: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_machines": 1,
    "num_processes": 1,
    "deepspeed_config": {"deepspeed_config_file": "ds_config.json"},
}


def _example(**sections: Any) -> Example:
    return Example(
        deepspeed={**_ZERO2, **sections},
        accelerate=_NAMED,
        route=Route.ACCELERATE,
        command="accelerate launch --config_file accelerate.yaml --mixed_precision bf16",
    )


RULES = (
    Rule(
        id="mixed-precision-turned-off-in-file",
        severity=Severity.ERROR,
        summary="the DeepSpeed file turns off the number format that was asked for",
        why="the DeepSpeed file has the last word, and the run trains in fp32 without a message",
        fix='write "auto" or true for enabled in the DeepSpeed file',
        see=_PLUGIN,
        find=_turned_off,
        bad=_example(bf16={"enabled": False}),
        good=_example(bf16={"enabled": "auto"}),
        evidence=Evidence(outcome=Outcome.IGNORED, observed=(("parameter_dtype", "float32"),)),
    ),
    Rule(
        id="mixed-precision-against-file",
        severity=Severity.ERROR,
        summary="accelerate refuses one number format where the DeepSpeed file has the other",
        why="a run has one format for forward and backward",
        fix="choose one of bf16 and fp16 in both places",
        see=_PLUGIN,
        find=_opposite,
        bad=_example(fp16={"enabled": True}),
        good=_example(bf16={"enabled": True}),
        evidence=Evidence(outcome=Outcome.FAILS, says="`--mixed_precision` arg cannot be set to `bf16`"),
    ),
)
