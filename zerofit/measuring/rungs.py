"""The rungs: what each changes of a run, by the names that a user gives them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
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
from zerofit.measuring.results import Published

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BASELINE = "baseline"
DEFAULT_RUNGS = "baseline,accumulation,checkpointing,adafactor,freeze-blocks,length-64"
"""The published ladder."""
PUBLISHED_MODEL, PUBLISHED_BATCH, PUBLISHED_LENGTH = "chinese-macbert-large", 32, 128
_NEAR = 3
"""Names that a message offers for a wrong one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that a rung trains under."""

    strategy: Strategy
    """With micro-batch and accumulation filled in."""
    sequence_length: int
    """Tokens of a sample."""
    weights: Precision = Precision.FP32
    """Format in which the loop makes the model."""
    num_ranks: int = 1
    """Data-parallel ranks under DeepSpeed, of which rank 0 is measured."""

    @property
    def batch_size(self) -> int:
        """Samples of an optimizer step, on one rank."""
        return (self.strategy.micro_batch_size or 1) * (self.strategy.gradient_accumulation_steps or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One change, on top of those before it."""

    name: str
    """As a user names it."""
    words: str
    """What it is, for the table."""
    change: Callable[[Run], Run]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rung with the run that it comes to."""

    rung: Rung
    label: str
    """Its words, with a "+" where it stands on others."""
    before: Run
    """What it changes."""
    run: Run


def baseline(*, batch_size: int, sequence_length: int, attention: str, num_ranks: int = 1) -> Run:
    """Return what the ladder starts from: the whole batch at once, fp32, torch's foreach AdamW.

    Args:
        batch_size: samples of an optimizer step, on the rank that is measured.
        sequence_length: tokens of a sample.
        attention: transformers' attn_implementation.
        num_ranks: data-parallel ranks; above 1 every rung must be one of DeepSpeed.
    """
    strategy = Strategy(
        precision=Precision.FP32,
        micro_batch_size=batch_size,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        attention=attention,
    )
    return Run(strategy=strategy, sequence_length=sequence_length, num_ranks=num_ranks)


def climb(
    rungs: Sequence[Rung], base: Run, *, is_cumulative: bool, before: Run | None = None
) -> tuple[Step, ...]:
    """Return each rung with what it runs under.

    Args:
        rungs: in the order in which they run; BASELINE goes back to the start.
        base: what the ladder starts from.
        is_cumulative: whether a rung stands on those before it, or alone on the baseline.
        before: what the first of them stands on; None for the baseline.

    Raises:
        UserError: a rung does not go with the batch.
    """
    steps: list[Step] = []
    below = before or base
    for rung in rungs:
        if rung.name == BASELINE or not is_cumulative:
            below = base
        run = rung.change(below)
        label = rung.words if rung.name == BASELINE else f"+ {rung.words}"
        steps.append(Step(rung=rung, label=label, before=below, run=run))
        below = run
    return tuple(steps)


def parse_rungs(text: str) -> tuple[Rung, ...]:
    """Return the rungs that a user names, with commas between.

    Raises:
        UserError: one is not known, or none is named.
    """
    names = [name.strip().lower().replace("_", "-") for name in text.split(",")]
    return tuple(rung_named(name) for name in names if name) or _none_named(text)


def rung_named(name: str) -> Rung:
    """Return one rung.

    Raises:
        UserError: there is none of this name.
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
    """Return all names, N for a number."""
    return (*_PLAIN, *(pattern for pattern, _, _ in _NUMBERED))


def changes(before: Run, after: Run) -> Iterator[str]:
    """Yield what differs between two runs, as "micro_batch_size 32 -> 1"."""
    for field in fields(Strategy):
        old, new = getattr(before.strategy, field.name), getattr(after.strategy, field.name)
        if old != new:
            yield f"{field.name} {_said(old)} -> {_said(new)}"
    if before.sequence_length != after.sequence_length:
        yield f"sequence_length {before.sequence_length} -> {after.sequence_length}"


def published_of(model: str, base: Run, run: Run) -> Published | None:
    """Return what was published of a run, where the model, the sizes and the strategy are the same.

    Args:
        model: its name in the catalog.
        base: what the ladder starts from.
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
"""Memory and time of an epoch on chinese-macbert-large as its author measured them, a rung each of
DEFAULT_RUNGS. Neither GPU nor versions are stated, nor whether "G" is GiB or GB."""


def _strategy(**changed: Any) -> Callable[[Run], Run]:
    """Return what changes these fields of the strategy."""
    return lambda run: replace(run, strategy=replace(run.strategy, **changed))


def _zero(stage: ZeroStage) -> tuple[str, Callable[[Run], Run]]:
    return f"ZeRO-{stage.value}", _strategy(engine=Engine.DEEPSPEED, zero_stage=stage)


def _micro_batches(samples: int) -> Callable[[Run], Run]:
    def change(run: Run) -> Run:
        if run.batch_size % samples:
            raise _does_not_divide(samples, run.batch_size)
        return _strategy(micro_batch_size=samples, gradient_accumulation_steps=run.batch_size // samples)(run)

    return change


def _length(tokens: int) -> Callable[[Run], Run]:
    return lambda run: replace(run, sequence_length=tokens)


def _checkpointing(every: int) -> Callable[[Run], Run]:
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

_PLAIN: dict[str, tuple[str, Callable[[Run], Run]]] = {
    BASELINE: ("baseline", lambda run: run),
    "accumulation": ("accumulation", _micro_batches(1)),
    "checkpointing": ("gradient checkpointing", _checkpointing(1)),
    **{str(name.value): (words, _strategy(optimizer=name)) for name, words in _OPTIMIZER_WORDS.items()},
    "fused-adamw": ("fused AdamW", _strategy(optimizer=OptimizerName.ADAMW)),
    "freeze-blocks": ("frozen blocks", _strategy(freeze=(BLOCKS,))),
    "freeze-embeddings": ("frozen embeddings", _strategy(freeze=("embeddings",))),
    "all-but-head": ("all frozen but the head", _strategy(freeze=("all-but-head",))),
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
"""Words and change by name."""
_NUMBERED: tuple[tuple[str, str, Callable[[int], Callable[[Run], Run]]], ...] = (
    ("micro-batch-N", "micro-batches of N", _micro_batches),
    ("checkpoint-every-N", "checkpointing of 1 block in N", _checkpointing),
    ("freeze-first-N", "frozen embeddings and N blocks", lambda n: _strategy(freeze=(f"embeddings+{n}",))),
    ("lora-N", "LoRA of rank N", lambda n: _strategy(lora=Lora(rank=n, alpha=2 * n))),
    ("length-N", "length N", _length),
)
"""Pattern of the name, words, and what makes the change of the number."""


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
        f"there is no rung {name!r}",
        found=f"--rungs with {name}",
        why=f"the rungs are {', '.join(rung_names())}",
        fix=f"did you mean {' or '.join(near)}?" if near else "name some of them, with commas between",
    )


def _none_named(text: str) -> tuple[Rung, ...]:
    raise UserError(
        "no-rungs",
        "no rung is named",
        found=f"--rungs {text!r}",
        why="each rung is one run",
        fix=f"name some, as --rungs {DEFAULT_RUNGS}, or leave --rungs out",
    )


def _does_not_divide(samples: int, batch_size: int) -> UserError:
    divisors = [number for number in range(1, batch_size + 1) if batch_size % number == 0]
    near = min(divisors, key=lambda number: abs(number - samples))
    return UserError(
        "ladder-batch-not-divisible",
        "the batch does not divide into such micro-batches",
        found=f"--rungs with micro-batch-{samples}, and a batch of {batch_size}",
        why="every rung trains on the same batch, so that losses and times can be compared",
        fix=f"name micro-batch-{near}, or another --batch-size",
    )
