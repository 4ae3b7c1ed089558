"""Rules of the optimizer section in DeepSpeed's configuration, and of the script that must fit it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.rule import Evidence, Example, Hit, Outcome, Rule, Severity
from zerofit.checking.rules.optimizer.facts import UNTESTED_KEY, because_of, hit, optimizer_script, place
from zerofit.checking.rules.optimizer.groups import OF_CONFIG
from zerofit.checking.rules.optimizer.row import Answer, Cause
from zerofit.checking.rules.optimizer.table import verdict
from zerofit.configs.document import SetValue
from zerofit.configs.quote import say
from zerofit.core.command import Route
from zerofit.core.errors import nearest
from zerofit.core.setting import Confidence
from zerofit.core.strategy import OffloadDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document, Edit, Entry

_DOCS = "https://www.deepspeed.ai/docs/config-json/#optimizer-parameters"
_ENGINE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py"
_PREPARE = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py"


def _type_of(situation: Situation) -> tuple[Document, Entry, str] | None:
    """Return DeepSpeed's file, the entry of optimizer.type and its value."""
    file = situation.deepspeed
    entry = file.at("optimizer", "type") if file else None
    if file is None or entry is None or not isinstance(entry.plain, str):
        return None
    return file, entry, entry.plain


def _unknown_type(situation: Situation) -> Iterator[Hit]:
    found = _type_of(situation)
    if found is None or (names := _own_name(found[2])) in _TYPES or names.startswith("Mu"):
        return
    file, entry, value = found
    near = nearest(value, _TYPES)
    fix = f"did you mean {near}?" if near else "use AdamW"
    yield Hit(found=say(file, "optimizer", "type"), place=file.place(entry.key_span), fix=fix)


def _untested(situation: Situation) -> Iterator[Hit]:
    placed = place(situation)
    if placed is None or placed.row.cause is not Cause.UNTESTED or placed.optimizer.value is None:
        return
    allowed = verdict(
        placed.optimizer.value,
        zero_stage=placed.zero_stage.value,
        optimizer_offload=placed.optimizer_offload.value,
        param_offload=OffloadDevice.NONE,
        forces_cpu_optimizer=placed.forces_cpu_optimizer,
        route=situation.route or Route.NATIVE,
        allows_untested=True,
    )
    found = hit(placed)
    edits: tuple[Edit, ...] = ()
    if situation.deepspeed is not None and allowed.answer is Answer.ALLOWED and not allowed.not_run:
        edits = (SetValue(document=situation.deepspeed.name, path=(UNTESTED_KEY,), value=True),)
    fix = None if allowed.answer in (Answer.ALLOWED, Answer.UNKNOWN) else "use AdamW"
    yield Hit(found=found.found, place=found.place, fix=fix, edits=edits, confidence=found.confidence)


def _adam_decoupled(situation: Situation) -> Iterator[Hit]:
    found = _type_of(situation)
    if found is None or found[2].lower() != "adam":
        return
    file, entry, _ = found
    params = file.value("optimizer", "params")
    if not isinstance(params, dict) or "adam_w_mode" in params:
        return
    decay = params.get("weight_decay")
    if isinstance(decay, (int, float)) and decay > 0:
        words = [say(file, "optimizer", "type"), say(file, "optimizer", "params", "weight_decay")]
        yield Hit(found=" with ".join(words), place=file.place(entry.key_span))


def _muon_scatters(situation: Situation) -> Iterator[Hit]:
    if situation.deepspeed is None or situation.deepspeed.value(*_REDUCE_SCATTER) is False:
        return
    placed = place(situation)
    if placed is not None and placed.row.cause is Cause.REDUCE_SCATTER:
        edit = SetValue(document=situation.deepspeed.name, path=_REDUCE_SCATTER, value=False)
        yield Hit(found=placed.texts, place=placed.optimizer.place, edits=(edit,))


def _section_and_script(situation: Situation) -> Iterator[Hit]:
    found = _type_of(situation)
    if found is None or situation.script is None or situation.route is not Route.ACCELERATE:
        return
    file, entry, _ = found
    for used in situation.script.optimizers:
        if used.id != "accelerate.DummyOptim":
            yield Hit(
                found=f"{used.text} with {say(file, 'optimizer', 'type')} in {file.name}",
                place=file.place(entry.key_span),
                confidence=Confidence.LIKELY,
            )


_REDUCE_SCATTER = ("zero_optimization", "reduce_scatter")
_TYPES = tuple(name.removeprefix("config.") for name in OF_CONFIG)
_OWN = {
    "adam": "Adam",
    "adamw": "AdamW",
    "adagrad": "Adagrad",
    "lamb": "Lamb",
    "lion": "Lion",
    "muon": "Muon",
}
_OWN |= {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}


def _own_name(value: str) -> str:
    """Return an optimizer's type as DeepSpeed takes it: its own in any case of letters."""
    return _OWN.get(value.lower(), value)


def _zero(kind: str | None = None, *, stage: int = 2, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **more.pop("zero", {})},
    }
    if kind is not None:
        config["optimizer"] = {"type": kind, "params": {"lr": 1e-2, **more.pop("params", {})}}
    return config | more


_SAVES = {"stage3_gather_16bit_weights_on_model_save": True}
_MUON3 = _zero("Muon", stage=3, zero=_SAVES)
_ADAMW3 = _zero("AdamW", stage=3, zero=_SAVES)
_DUMMY = optimizer_script("accelerate.utils.DummyOptim(model.parameters())", imports="accelerate.utils")
_ADAM = optimizer_script("torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)")
_ADAMW = optimizer_script("torch.optim.AdamW(model.parameters(), lr=1e-2)")

RULES = (
    Rule(
        id="unknown-optimizer-type",
        severity=Severity.ERROR,
        summary="DeepSpeed has no optimizer of this name",
        why="optimizer.type is one of DeepSpeed's own, or a class of torch.optim spelt as there",
        fix="use AdamW",
        see=_DOCS,
        find=_unknown_type,
        bad=Example(deepspeed=_zero("OneBitAdam"), script=_DUMMY),
        good=Example(deepspeed=_zero("AdamW"), script=_DUMMY),
        evidence=Evidence(outcome=Outcome.FAILS, says="OneBitAdam is not a supported DeepSpeed Optimizer"),
    ),
    Rule(
        id="untested-optimizer-needs-flag",
        severity=Severity.ERROR,
        summary="DeepSpeed wants to be told that this optimizer may meet ZeRO",
        why="it has tested few with ZeRO, and accelerate answers for optimizers of the script alone",
        fix=f"write {UNTESTED_KEY}: true",
        see=_ENGINE,
        find=_untested,
        bad=Example(deepspeed=_zero("SGD"), script=_DUMMY),
        good=Example(deepspeed=_zero("SGD", **{UNTESTED_KEY: True}), script=_DUMMY),
        evidence=Evidence(outcome=Outcome.FAILS, says="You are using an untested ZeRO Optimizer"),
    ),
    Rule(
        id="adam-section-decays-as-adamw",
        severity=Severity.WARNING,
        summary="DeepSpeed's Adam decays weights as AdamW does",
        why="adam_w_mode is true unless the section says otherwise, whatever its type",
        fix="set optimizer.type to AdamW, or optimizer.params.adam_w_mode to false",
        see=_DOCS,
        find=_adam_decoupled,
        bad=Example(deepspeed=_zero("Adam", params={"weight_decay": 0.1}), script=_DUMMY),
        good=Example(deepspeed=_zero(), script=_ADAM),
        evidence=Evidence(outcome=Outcome.DIFFERS),
    ),
    Rule(
        id="muon-needs-whole-gradients",
        severity=Severity.ERROR,
        summary="at ZeRO-3 DeepSpeed's Muon needs reduce_scatter: false",
        why="it orthogonalises whole gradients, and scattered ones are in pieces before its step",
        fix="write reduce_scatter: false in zero_optimization",
        see="https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage3.py",
        find=_muon_scatters,
        bad=Example(deepspeed=_MUON3, script=_DUMMY),
        good=Example(deepspeed=_ADAMW3, script=_DUMMY),
        evidence=Evidence(outcome=Outcome.FAILS, says="Muon and reduce scatter cannot be used together"),
    ),
    Rule(
        id="two-optimizers",
        severity=Severity.ERROR,
        summary="the script and the DeepSpeed file each bring an optimizer",
        why="prepare() takes one of them, and refuses both",
        fix="make an accelerate.utils.DummyOptim in the script, or take the optimizer section out",
        see=_PREPARE,
        find=_section_and_script,
        bad=Example(deepspeed=_zero("AdamW"), script=_ADAMW),
        good=Example(deepspeed=_zero("AdamW"), script=_DUMMY),
        evidence=Evidence(
            outcome=Outcome.FAILS, says="You cannot specify an optimizer in the config file and in the code"
        ),
    ),
    Rule(
        id="dummy-optimizer-needs-section",
        severity=Severity.ERROR,
        summary="DummyOptim stands for an optimizer section that is not there",
        why="accelerate puts nothing in its place: DeepSpeed makes the optimizer from its own file",
        fix="make a real optimizer in the script, or add an optimizer section to the DeepSpeed file",
        see=_PREPARE,
        find=because_of(Cause.NO_SECTION, Cause.NOT_AN_OPTIMIZER),
        bad=Example(deepspeed=_zero(), script=_DUMMY),
        good=Example(deepspeed=_zero("AdamW"), script=_DUMMY),
        evidence=Evidence(outcome=Outcome.FAILS, says="You cannot create a `DummyOptim` without specifying"),
    ),
)
