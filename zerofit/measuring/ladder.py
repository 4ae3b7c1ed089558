"""The ladder of strategies: its rungs by name, and their results."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.facts import Versions
from zerofit.core.freezing import BLOCKS
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    Strategy,
    ZeroStage,
)
from zerofit.measuring.results import TrialMeasurement, TrialOutcome, TrialPrediction, TrialSpec, TrialState
from zerofit.measuring.trial import TrialFiles, run_trial

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from zerofit.models.source import ModelSource

BASELINE = "baseline"
DEFAULT_RUNGS = "baseline,accumulation,checkpointing,adafactor,freeze-blocks,length-64"
"""The published ladder."""
PUBLISHED_MODEL, PUBLISHED_BATCH, PUBLISHED_LENGTH = "chinese-macbert-large", 32, 128
CPU = "CPU"
"""A ladder's device name for the CPU."""
_NEAR = 3
"""Maximum number of suggestions for a wrong name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRun:
    """The settings of a rung's training."""

    strategy: Strategy
    """With micro-batch and accumulation filled in."""
    sequence_length: int
    """Tokens per sample."""
    weights: Precision = Precision.FP32
    """Format in which the loop creates the model."""
    num_ranks: int = 1
    """Data-parallel ranks under DeepSpeed; rank 0 is measured."""

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step on one rank."""
        return (self.strategy.micro_batch_size or 1) * (self.strategy.gradient_accumulation_steps or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One change, applied on top of those before it."""

    name: str
    """The user's name for it."""
    words: str
    """Its label in the table."""
    change: Callable[[LadderRun], LadderRun]


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderStep:
    """One rung with its settings."""

    rung: Rung
    label: str
    """Its label, with a "+" if it is on top of others."""
    before: LadderRun
    """The settings before its change."""
    run: LadderRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Published measurements of one rung, for the same model and sizes."""

    memory_g: float
    """As printed, in "G"."""
    epoch_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One rung."""

    name: str
    """The user's name for it."""
    label: str
    """Its label: "+ Adafactor"."""
    strategy: Strategy
    """All settings, from its own change and those before it."""
    sequence_length: int
    outcome: TrialOutcome
    predicted: TrialPrediction | None = None
    published: Published | None = None

    @property
    def measured(self) -> TrialMeasurement | None:
        """Its measurements; None unless it completed."""
        return self.outcome.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """A whole ladder on one machine."""

    model: str
    architecture: str
    num_parameters: int
    batch_size: int
    """Samples per optimizer step on the measured rank, equal for all rungs."""
    sequence_length: int
    """Tokens per sample, unless a rung changes it."""
    device: str
    """The GPU's name, or "CPU"."""
    is_cumulative: bool
    """True if each rung is on top of those before it."""
    predicted_for: str | None
    """The GPU of the prediction; None without one."""
    versions: Versions
    rungs: tuple[RungResult, ...]
    num_ranks: int = 1
    """Data-parallel ranks; rank 0 was measured, and above 1 its collectives did nothing."""
    version: int = 1
    """Of this file format; raised whenever older files can no longer be read correctly."""

    @property
    def on_cpu(self) -> bool:
        """True if it was measured on the CPU."""
        return self.device == CPU


def ladder_to_json(ladder: Ladder) -> str:
    """Return a ladder as the text of a file."""
    return json.dumps(dataclasses.asdict(ladder), indent=2) + "\n"


def baseline(
    *, batch_size: int, sequence_length: int, attention: str = "eager", num_ranks: int = 1
) -> LadderRun:
    """Return the ladder's starting point: the whole batch at once, fp32, torch's foreach AdamW.

    Args:
        batch_size: samples per optimizer step on the measured rank.
        sequence_length: tokens per sample.
        attention: transformers' attn_implementation.
        num_ranks: data-parallel ranks; above 1 every rung must use DeepSpeed.
    """
    strategy = Strategy(
        precision=Precision.FP32,
        micro_batch_size=batch_size,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        attention=attention,
    )
    return LadderRun(strategy=strategy, sequence_length=sequence_length, num_ranks=num_ranks)


def climb(
    rungs: Sequence[Rung], base: LadderRun, *, is_cumulative: bool, before: LadderRun | None = None
) -> tuple[LadderStep, ...]:
    """Return each rung with its settings.

    Args:
        rungs: in the order in which they run; BASELINE returns to the start.
        base: the starting point.
        is_cumulative: whether a rung is on top of those before it, or of the baseline.
        before: settings below the first rung; None for the baseline.

    Raises:
        UserError: a rung is incompatible with the batch size.
    """
    steps: list[LadderStep] = []
    below = before or base
    for rung in rungs:
        if rung.name == BASELINE or not is_cumulative:
            below = base
        run = rung.change(below)
        label = rung.words if rung.name == BASELINE else f"+ {rung.words}"
        steps.append(LadderStep(rung=rung, label=label, before=below, run=run))
        below = run
    return tuple(steps)


def measure_rungs(
    rungs: Sequence[Rung],
    base: LadderRun,
    template: TrialSpec,
    *,
    is_cumulative: bool,
    folder: Path,
    limit_s: float,
) -> Iterator[tuple[LadderStep, TrialOutcome | None]]:
    """Run each rung in a fresh process, one after another.

    A rung that can't run here is left out below the following ones. One that ran out of memory is not, since
    a following change may fix that.

    Args:
        rungs: in order.
        base: the starting point.
        template: common settings of all rungs: the model, the device and the number of steps.
        is_cumulative: whether a rung is on top of those before it.
        folder: for the files of the processes.
        limit_s: time limit of one rung.

    Yields:
        Each rung with None before it runs, and with its outcome afterwards.
    """
    below = base
    for number, rung in enumerate(rungs, 1):
        (step,) = climb([rung], base, is_cumulative=is_cumulative, before=below)
        yield step, None
        run = step.run
        spec = replace(
            template,
            strategy=run.strategy,
            sequence_length=run.sequence_length,
            full_length=max(base.sequence_length, run.sequence_length),
            weights=run.weights,
            num_ranks=run.num_ranks,
        )
        files = TrialFiles(folder=folder, name=f"{number:02}-{rung.name}")
        outcome = run_trial(spec, files, limit_s=limit_s)
        yield step, outcome
        below = step.before if outcome.state is TrialState.CANNOT_RUN else run


def make_ladder(
    model: ModelSource,
    base: LadderRun,
    measured: Sequence[tuple[LadderStep, TrialOutcome]],
    predicted: Sequence[TrialPrediction | None],
    **others: Any,
) -> Ladder:
    """Return the ladder of measurements and predictions, one of each per rung.

    Args:
        model: the model.
        base: the starting point.
        measured: each rung and its outcome.
        predicted: for each rung; None without a prediction.
        others: the other fields of Ladder.
    """
    return Ladder(
        model=model.name,
        architecture=model.facts.architecture,
        num_parameters=model.facts.num_parameters,
        batch_size=base.batch_size,
        num_ranks=base.num_ranks,
        sequence_length=base.sequence_length,
        rungs=tuple(
            RungResult(
                name=step.rung.name,
                label=step.label,
                strategy=step.run.strategy,
                sequence_length=step.run.sequence_length,
                outcome=outcome,
                predicted=figures,
                published=published_of(model.name, base, step.run),
            )
            for (step, outcome), figures in zip(measured, predicted, strict=True)
        ),
        **others,
    )


def parse_rungs(text: str) -> tuple[Rung, ...]:
    """Return the rungs in a comma-separated list.

    Raises:
        UserError: one is unknown, or the list is empty.
    """
    names = [name.strip().lower().replace("_", "-") for name in text.split(",") if name.strip()]
    if not names:
        raise _unknown("")
    return tuple(rung_named(name) for name in names)


def rung_named(name: str) -> Rung:
    """Return one rung.

    Raises:
        UserError: there is none with this name.
    """
    if name in _PLAIN:
        words, change = _PLAIN[name]
        return Rung(name=name, words=words, change=change)
    for pattern, words, make in _NUMBERED:
        found = re.fullmatch(pattern.replace("N", "([1-9][0-9]{0,5})"), name)
        if found:
            number = int(found[1])
            return Rung(name=name, words=words.replace("N", str(number)), change=make(number))
    raise _unknown(name)


def rung_names() -> tuple[str, ...]:
    """Return all names, with N for a number."""
    return (*_PLAIN, *(pattern for pattern, _, _ in _NUMBERED))


def changes(before: LadderRun, after: LadderRun) -> Iterator[str]:
    """Yield the differences between two runs, as "micro_batch_size 32 -> 1"."""
    for field in fields(Strategy):
        old, new = getattr(before.strategy, field.name), getattr(after.strategy, field.name)
        if old != new:
            yield f"{field.name} {_said(old)} -> {_said(new)}"
    if before.sequence_length != after.sequence_length:
        yield f"sequence_length {before.sequence_length} -> {after.sequence_length}"


def published_of(model: str, base: LadderRun, run: LadderRun) -> Published | None:
    """Return the published measurements of a run with the same model, sizes and strategy, or None.

    Args:
        model: its name in the catalog.
        base: the ladder's starting point.
        run: one of its runs.
    """
    sizes = (model, base.batch_size, base.sequence_length)
    if sizes != (PUBLISHED_MODEL, PUBLISHED_BATCH, PUBLISHED_LENGTH):
        return None
    steps = climb(parse_rungs(DEFAULT_RUNGS), base, is_cumulative=True)
    found = (figures for step, figures in zip(steps, _PUBLISHED, strict=True) if step.run == run)
    return next(found, None)


_PUBLISHED = tuple(
    Published(memory_g=memory_g, epoch_time_s=epoch_time_s)
    for memory_g, epoch_time_s in (
        (15.1, 44.1),
        (7.5, 122.0),
        (7.3, 461.0),
        (5.5, 455.0),
        (3.5, 119.0),
        (3.4, 110.0),
    )
)
"""Memory and time per epoch of chinese-macbert-large as measured by its author, for each of DEFAULT_RUNGS.
Neither GPU nor versions are stated, nor whether "G" is GiB or GB."""


def _strategy(**changed: Any) -> Callable[[LadderRun], LadderRun]:
    """Return a function that changes these fields of the strategy."""
    return lambda run: replace(run, strategy=replace(run.strategy, **changed))


def _zero(stage: ZeroStage) -> tuple[str, Callable[[LadderRun], LadderRun]]:
    return f"ZeRO-{stage.value}", _strategy(engine=Engine.DEEPSPEED, zero_stage=stage)


def _micro_batches(samples: int) -> Callable[[LadderRun], LadderRun]:
    def change(run: LadderRun) -> LadderRun:
        if run.batch_size % samples:
            raise _does_not_divide(samples, run.batch_size)
        return _strategy(micro_batch_size=samples, gradient_accumulation_steps=run.batch_size // samples)(run)

    return change


def _length(tokens: int) -> Callable[[LadderRun], LadderRun]:
    return lambda run: replace(run, sequence_length=tokens)


def _checkpointing(every: int) -> Callable[[LadderRun], LadderRun]:
    return _strategy(gradient_checkpointing=True, checkpoint_every=every)


_OPTIMIZER_WORDS = {
    OptimizerName.ADAFACTOR: "Adafactor",
    OptimizerName.SGD: "SGD",
    OptimizerName.LION: "Lion",
    OptimizerName.LION_8BIT: "8-bit Lion",
    OptimizerName.PAGED_LION_8BIT: "paged 8-bit Lion",
    OptimizerName.ADAMW_8BIT: "8-bit AdamW",
    OptimizerName.PAGED_ADAMW: "paged AdamW",
    OptimizerName.PAGED_ADAMW_8BIT: "paged 8-bit AdamW",
}

_PLAIN: dict[str, tuple[str, Callable[[LadderRun], LadderRun]]] = {
    BASELINE: ("baseline", lambda run: run),
    "accumulation": ("accumulation", _micro_batches(1)),
    "checkpointing": ("gradient checkpointing", _checkpointing(1)),
    **{str(name.value): (words, _strategy(optimizer=name)) for name, words in _OPTIMIZER_WORDS.items()},
    "fused-adamw": ("fused AdamW", _strategy(optimizer=OptimizerName.ADAMW)),
    "freeze-blocks": ("frozen blocks", _strategy(freeze=(BLOCKS,))),
    "freeze-embeddings": ("frozen embeddings", _strategy(freeze=("embeddings",))),
    "all-but-head": ("all but the head frozen", _strategy(freeze=("all-but-head",))),
    "lora": ("LoRA", _strategy(lora=Lora())),
    "qlora": ("QLoRA", _strategy(lora=Lora(), quantization=Quantization.NF4)),
    "bf16": ("bf16", _strategy(precision=Precision.BF16)),
    "fp16": ("fp16", _strategy(precision=Precision.FP16)),
    "tf32": ("tf32", _strategy(tf32=True)),
    "sdpa": ("sdpa attention", _strategy(attention="sdpa")),
    "flash": ("flash attention 2", _strategy(attention="flash_attention_2")),
    "liger": ("Liger kernels", _strategy(liger=True)),
    "compile": ("torch.compile", _strategy(compile=True)),
    **{f"zero-{stage.value}": _zero(stage) for stage in ZeroStage if stage is not ZeroStage.NOTHING},
    "offload-optimizer": ("optimizer on the host", _strategy(optimizer_offload=OffloadDevice.CPU)),
    "offload-param": ("parameters on the host", _strategy(param_offload=OffloadDevice.CPU)),
}
"""Label and change by name."""
_NUMBERED: tuple[tuple[str, str, Callable[[int], Callable[[LadderRun], LadderRun]]], ...] = (
    ("micro-batch-N", "micro-batches of N", _micro_batches),
    ("checkpoint-every-N", "every Nth block checkpointed", _checkpointing),
    ("freeze-first-N", "frozen embeddings and N blocks", lambda n: _strategy(freeze=(f"embeddings+{n}",))),
    ("lora-N", "LoRA of rank N", lambda n: _strategy(lora=Lora(rank=n, alpha=2 * n))),
    ("length-N", "length N", _length),
)
"""Pattern of the name, label, and a function from the number to the change."""


def _said(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "nothing"
    return f"rank {value.rank}" if isinstance(value, Lora) else str(value)


def _unknown(name: str) -> UserError:
    near = difflib.get_close_matches(name, rung_names(), n=_NEAR, cutoff=0.5)
    return UserError(
        "unknown-rung",
        f"there is no rung {name!r}" if name else "no rung is named",
        found=f"--rungs with {name!r}",
        why=f"the rungs are {', '.join(rung_names())}",
        fix=f"did you mean {' or '.join(near)}?" if near else f"name some, as --rungs {DEFAULT_RUNGS}",
    )


def _does_not_divide(samples: int, batch_size: int) -> UserError:
    divisors = [number for number in range(1, batch_size + 1) if batch_size % number == 0]
    near = min(divisors, key=lambda number: abs(number - samples))
    return UserError(
        "ladder-batch-not-divisible",
        "the batch size is not divisible by the micro-batch size",
        found=f"--rungs with micro-batch-{samples}, and a batch of {batch_size}",
        why="every rung trains on the same batch, so that losses and times can be compared",
        fix=f"name micro-batch-{near}, or another --batch-size",
    )
