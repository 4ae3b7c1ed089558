"""Rules on keys of ds_config.json that accelerate and Trainer also read, each in its own way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import ACCELERATE, Hit, Rule, Severity, declared, fails, hit_at, ignored
from zerofit.checking.situation import entries_of, is_read_by_others, known, stage_of
from zerofit.configs.document import Format, RemoveKey, RenameKey, say
from zerofit.configs.text.json import why_not_json
from zerofit.core.command import Route
from zerofit.core.setting import Place
from zerofit.core.strategy import ZeroStage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document
    from zerofit.configs.schema import FoundKey


_GATHER = "stage3_gather_16bit_weights_on_model_save"
_GATHERS = (_GATHER, "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")


@Rule(
    id="deepspeed-hjson-needs-native",
    severity=Severity.ERROR,
    summary="accelerate and Trainer read plain JSON only",
    why="comments and other extensions are HJSON, which only DeepSpeed itself reads",
    fix="remove what is not JSON",
    see=f"{ACCELERATE}/utils/deepspeed.py",
    evidence=fails("JSONDecodeError"),
)
def _only_hjson(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    problem = why_not_json(document.text) if document.format is Format.HJSON else None
    if problem and is_read_by_others(situation):
        place = Place(file=document.name, line=problem.line, column=problem.column)
        yield Hit(found=problem.problem, place=place)


@Rule(
    id="deepspeed-zero-section-missing",
    severity=Severity.ERROR,
    summary="accelerate and Trainer need the section zero_optimization",
    why="they require its keys, while DeepSpeed itself defaults to stage 0, or stage 1 for true",
    fix="set its stage",
    see=f"{ACCELERATE}/utils/dataclasses.py",
    evidence=fails("Please specify the ZeRO optimization config"),
)
def _without_zero_section(situation: Situation) -> Iterator[Hit]:
    document = situation.deepspeed
    entry = document.at("zero_optimization") if document else None
    if document and document.value("autotuning", "enabled") is True:
        return  # the autotuner writes a section of its own for each trial
    if document and isinstance(entry.plain if entry else True, bool) and is_read_by_others(situation):
        found = f"{document.name} without zero_optimization" if entry is None else say(document, entry.key)
        yield hit_at(document, ("zero_optimization",), found=found)


@Rule(
    id="bfloat16-is-bf16",
    severity=Severity.WARNING,
    summary="accelerate and Trainer only know the section bf16, not its old name bfloat16",
    why="they add their own section bf16, and DeepSpeed then ignores bfloat16",
    fix="rename bfloat16 to bf16",
    see=f"{ACCELERATE}/utils/dataclasses.py",
    evidence=ignored(("parameter_dtype", "float32")),
)
def _old_bf16(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    is_on = document.value("bfloat16", "enabled") not in (None, False, "auto")
    if is_on and document.at("bf16") is None and is_read_by_others(situation):
        edit = RenameKey(document=document.name, path=("bfloat16",), key="bf16")
        yield hit_at(document, ("bfloat16",), found=say(document, "bfloat16", "enabled"), edits=(edit,))


@Rule(
    id="cpu-offload-is-offload-optimizer",
    severity=Severity.ERROR,
    summary="accelerate and Trainer only know offload_optimizer, not its old name cpu_offload",
    why="they keep the script's optimizer, and DeepSpeed refuses to offload it",
    fix='write "offload_optimizer": {"device": "cpu"} instead of cpu_offload',
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails("ZeRO-Offload with a client provided optimizer"),
)
def _unseen_offload(situation: Situation) -> Iterator[Hit]:
    for document, found in entries_of(situation):
        if is_unseen_offload(situation, found):
            yield hit_at(document, found.path)


def is_unseen_offload(situation: Situation, found: FoundKey) -> bool:
    """Return True if an entry is the deprecated offload switch, which accelerate does not recognize."""
    return (
        found.path == ("zero_optimization", "cpu_offload")
        and found.value is True
        and situation.route in (Route.ACCELERATE, Route.TRAINER)
        and situation.file.at("optimizer") is None
        and situation.file.value("zero_force_ds_cpu_optimizer") is not False
    )


@Rule(
    id="deepspeed-section-is-null",
    severity=Severity.ERROR,
    summary="accelerate and Trainer can't read a section that is null",
    why="they read its keys, while DeepSpeed itself treats null as a missing section",
    fix="remove it",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails("'NoneType' object has no attribute 'get'"),
)
def _null_sections(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    offload = () if document.at("optimizer") else (("zero_optimization", "offload_optimizer"),)
    for path in (("bf16",), *offload):
        if document.at(*path) and document.value(*path) is None and is_read_by_others(situation):
            yield hit_at(document, path, edits=(RemoveKey(document=document.name, path=path),))


@Rule(
    id="zero3-weights-need-gather",
    severity=Severity.WARNING,
    summary="with ZeRO-3, whole weights can only be saved if they are gathered",
    why="each rank has a part of them: get_state_dict raises, and Trainer saves no weights file",
    fix=f"set zero_optimization.{_GATHER} to true, or convert checkpoints with zero_to_fp32.py",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails("Cannot get 16bit model weights"),
)
def _not_gathered(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    if document.at("zero_optimization") is None:
        return
    stage = stage_of(situation)
    if stage.value is not ZeroStage.PARAMETERS or _gathers(situation, document):
        return
    if is_read_by_others(situation):
        name = next((name for name in _GATHERS if document.at("zero_optimization", name)), _GATHER)
        yield Hit(found=f"{stage.text} with {say(document, 'zero_optimization', name)}", place=stage.place)


def _gathers(situation: Situation, document: Document) -> bool:
    values = [document.value("zero_optimization", name) for name in _GATHERS]
    if "auto" in values and is_read_by_others(situation):
        flag = known(situation.command, "the launch command").find("zero3_save_16bit_model")
        return flag is not None and (flag.value or "true").lower() == "true"
    return any(value is True or value == 1 or str(value).lower() == "true" for value in values)


RULES = declared(vars())
