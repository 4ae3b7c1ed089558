"""Rules on who reads ds_config.json first: scripts in which zero.Init() does, before it is filled in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zerofit.checking.rule import ACCELERATE, COSTS, DEEPSPEED, Hit, Rule, Severity, declared, fails, hit_at
from zerofit.checking.rules.deepspeed.values import MICRO, STEPS, TRAIN, size_of
from zerofit.checking.rules.script.hits import at_stages
from zerofit.checking.situation import known
from zerofit.configs.document import RemoveKey, say
from zerofit.core.command import Route
from zerofit.core.setting import Confidence
from zerofit.core.strategy import ZeroStage
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document
    from zerofit.scripts.facts import ConfigFile, EarlyRead

_INTEGRATION = "https://huggingface.co/docs/transformers/deepspeed#non-trainer-integration"
_WHO_FILLS_IN = {
    Route.TRAINER: "create the TrainingArguments before the model and leave {} out",
    Route.ACCELERATE: "create the Accelerator before the model and leave {} out",
}


def early_reads_of(situation: Situation, *, by_accelerate: bool = False) -> Iterator[EarlyRead]:
    """Yield each early read of the situation's DeepSpeed file, at the stage at which there is one."""
    file, script = situation.deepspeed, situation.script
    stage = situation.settings.zero_stage
    if file is None or script is None:
        return
    for read in script.early_reads:
        is_this = by_accelerate or (read.file is not None and _is_of(file, read.file))
        # from_pretrained() only asks at stage 3; zero.Init() reads the file at any stage.
        is_read = read.at == read.reader or (stage is not None and stage.value is ZeroStage.PARAMETERS)
        if is_this and is_read and not read.is_dropped and read.is_by_accelerate is by_accelerate:
            yield read


def _is_of(file: Document, read: ConfigFile) -> bool:
    """Return True if a document is what a script reads, or may read by an argument that is not known.

    Both may be named from another folder.
    """
    if read.literal is not None:
        return read.literal == file.text
    if read.name is None:
        return read.argument is not None
    return read.name.rpartition("/")[2] == file.name.rpartition("/")[2]


def _confidence(read: EarlyRead) -> Confidence:
    by_argument = read.file is not None and read.file.argument is not None and read.file.name is None
    return Confidence.LIKELY if by_argument else read.confidence


def _when(read: EarlyRead) -> str:
    """Return who reads the file, and where: "HfDeepSpeedConfig(...) and from_pretrained(...) in line 9"."""
    if read.at == read.reader:
        return f"{read.reader.text} in line {read.reader.place.line}"
    return f"{read.reader.text}, for {read.at.text} in line {read.at.place.line}"


@Rule(
    id="zero-init-reads-auto",
    severity=Severity.ERROR,
    summary='zero.Init() reads "auto" before anything replaces it',
    why="HfDeepSpeedConfig uses the file as written; only TrainingArguments and Accelerator fill it in",
    fix="write numbers for the micro batch size and the accumulation steps, and leave train_batch_size out",
    see=_INTEGRATION,
    evidence=fails("'>' not supported between instances of 'str' and 'int'"),
)
def _auto(situation: Situation) -> Iterator[Hit]:
    file = situation.file
    autos = [name for name in (TRAIN, MICRO, STEPS) if file.value(name) == "auto"]
    for read in early_reads_of(situation) if autos else ():
        name = read.reader.text.partition("(")[0]
        instead = _WHO_FILLS_IN.get(situation.route) if situation.route and read.at != read.reader else None
        numbers = f"write numbers for {MICRO} and {STEPS}, and leave {TRAIN} out"
        yield hit_at(
            file,
            (autos[0],),
            found=f"{' and '.join(say(file, name) for name in autos)}, read by {_when(read)}",
            fix=f"{instead.format(name)}, or {numbers}" if instead else numbers,
            confidence=_confidence(read),
        )


@Rule(
    id="zero-init-counts-one-rank",
    severity=Severity.ERROR,
    summary="zero.Init() checks train_batch_size before DeepSpeed knows the ranks",
    why="it reads the file before it sets up DeepSpeed's communication, and then counts one rank",
    fix="leave train_batch_size out, or call deepspeed.init_distributed() before",
    see=f"{DEEPSPEED}/runtime/zero/partition_parameters.py",
    evidence=fails("Check batch related parameters"),
)
def _one_rank(situation: Situation) -> Iterator[Hit]:
    file, ranks = situation.file, situation.topology
    train, micro, steps = (size_of(file, name) for name in (TRAIN, MICRO, STEPS))
    if train is None or micro is None or steps is None or train == micro * steps:
        return
    if train % (micro * steps) or (ranks is not None and ranks.world_size == 1):
        return  # wrong on any number of ranks, or on this one: deepspeed-batch-sizes-disagree
    for read in early_reads_of(situation):
        if not read.knows_ranks:
            sizes = " and ".join(say(file, name) for name in (MICRO, STEPS))
            yield hit_at(
                file,
                (TRAIN,),
                found=f"{say(file, TRAIN)} with {sizes} on 1 rank, read by {_when(read)}",
                edits=(RemoveKey(document=file.name, path=(TRAIN,)),),
                confidence=_confidence(read),
            )


@Rule(
    id="accelerate-zero-init-takes-1",
    severity=Severity.ERROR,
    summary="under ZeRO-3 accelerate takes 1 for batch sizes that are missing when a model is created",
    why="it knows the batch size only at prepare(); a written train_batch_size is checked before, against 1",
    fix='write train_batch_size: "auto", or numbers for all three',
    see=f"{ACCELERATE}/utils/dataclasses.py",
    evidence=fails("Check batch related parameters"),
)
def _takes_1(situation: Situation) -> Iterator[Hit]:
    file = situation.file
    train, others = size_of(file, TRAIN), (MICRO, STEPS)
    lacking = [name for name in others if file.value(name) in (None, "auto")]
    invalid = [name for name in others if name not in lacking and size_of(file, name) is None]
    if train is None or not lacking or invalid or situation.route is not Route.ACCELERATE:
        return
    has_own = situation.script is not None and bool(situation.script.find(Action.MAKE_PLUGIN))
    for read in early_reads_of(situation, by_accelerate=True):
        num_ranks = known(situation.topology, "the number of ranks").world_size
        if train != num_ranks * math.prod(size_of(file, name) or 1 for name in others):
            ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
            sizes = " and ".join(say(file, name) for name in others)
            yield hit_at(
                file,
                (TRAIN,),
                found=f"{say(file, TRAIN)} with {sizes} on {ranks}, read by {_when(read)}",
                confidence=Confidence.LIKELY if has_own else _confidence(read),
            )


@Rule(
    id="hf-config-not-kept",
    severity=Severity.ADVICE,
    summary="HfDeepSpeedConfig() must be kept in a variable as long as models are created",
    why="transformers only has a weak reference to it; without it every rank loads the whole model",
    fix="keep it: dschf = HfDeepSpeedConfig(...)",
    see=_INTEGRATION,
    evidence=COSTS,
)
@at_stages(ZeroStage.PARAMETERS)
def _dropped(situation: Situation) -> Iterator[Hit]:
    for read in situation.script.early_reads if situation.script else ():
        if read.is_dropped:
            found = f"{read.reader.text} is gone before {read.at.text} in line {read.at.place.line}"
            yield Hit(found=found, place=read.reader.place, confidence=_confidence(read))


RULES = declared(vars())
