"""Rules of gradient accumulation in Accelerator(): the DeepSpeed file has the last word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.rule import Evidence, Example, Hit, Outcome, Rule, Severity
from zerofit.configs.document import SetValue
from zerofit.configs.quote import say
from zerofit.core.command import Route
from zerofit.core.setting import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document
    from zerofit.scripts.facts import Keyword, ScriptFacts

_PLUGIN = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py"
_ACCELERATOR = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py"
_STEPS = "gradient_accumulation_steps"


def _script_with_accelerator(situation: Situation) -> tuple[ScriptFacts, Document] | None:
    if situation.script is None or situation.deepspeed is None or situation.route is not Route.ACCELERATE:
        return None
    return situation.script, situation.deepspeed


def _steps_of(script: ScriptFacts) -> tuple[Keyword, int] | None:
    """Return the number of steps in Accelerator(...) and where it stands."""
    for keyword in script.accelerator_keywords:
        if keyword.name == _STEPS and type(keyword.value) is int:
            return keyword, keyword.value
    return None


def _steps_missing(situation: Situation) -> Iterator[Hit]:
    found = _script_with_accelerator(situation)
    steps = _steps_of(found[0]) if found else None
    if found is None or steps is None or steps[1] == 1 or found[1].at(_STEPS) is not None:
        return
    script, file = found
    yield Hit(
        found=f"Accelerator({steps[0].text}) with no {_STEPS} in {file.name}",
        place=_place(script, steps[0]),
        edits=(SetValue(document=file.name, path=(_STEPS,), value="auto"),),
        confidence=steps[0].confidence,
    )


def _steps_differ(situation: Situation) -> Iterator[Hit]:
    found = _script_with_accelerator(situation)
    steps = _steps_of(found[0]) if found else None
    if found is None or steps is None:
        return
    script, file = found
    value = file.value(_STEPS)
    if isinstance(value, int) and value != steps[1]:
        yield Hit(
            found=f"Accelerator({steps[0].text}) with {say(file, _STEPS)} in {file.name}",
            place=_place(script, steps[0]),
            confidence=steps[0].confidence,
        )


def _place(script: ScriptFacts, keyword: Keyword) -> Place:
    return Place(file=script.name, line=keyword.line, column=keyword.column)


_FOUR = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=4)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
_ZERO2: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}

RULES = (
    Rule(
        id="accumulation-not-in-deepspeed-file",
        severity=Severity.ERROR,
        summary="DeepSpeed does not accumulate what Accelerator() asks for",
        why="a file without gradient_accumulation_steps means 1, and accelerate takes the file's value",
        fix='write gradient_accumulation_steps: "auto" in the DeepSpeed file',
        see=_PLUGIN,
        find=_steps_missing,
        bad=Example(deepspeed=_ZERO2, script=_FOUR),
        good=Example(deepspeed={**_ZERO2, _STEPS: "auto"}, script=_FOUR),
        evidence=Evidence(outcome=Outcome.IGNORED, observed=((_STEPS, 1),)),
    ),
    Rule(
        id="accumulation-differs",
        severity=Severity.WARNING,
        summary="Accelerator() and the DeepSpeed file accumulate different numbers of steps",
        why="accelerate takes the DeepSpeed file's number and says so in one line of its log",
        fix='write gradient_accumulation_steps: "auto" in the DeepSpeed file, or the same number in both',
        see=_ACCELERATOR,
        find=_steps_differ,
        bad=Example(deepspeed={**_ZERO2, _STEPS: 8}, script=_FOUR),
        good=Example(deepspeed={**_ZERO2, _STEPS: 4}, script=_FOUR),
        evidence=Evidence(outcome=Outcome.IGNORED, observed=((_STEPS, 8),)),
    ),
)
