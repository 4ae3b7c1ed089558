"""The rungs of `zerofit bench ladder`: what each changes, and the `zerofit launch` line of a run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.freezing import BLOCKS
from zerofit.core.overrides import FLAGS, SWITCHED
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

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

BASELINE = "baseline"
ON_ONE_RANK = "baseline,accumulation,checkpointing,adafactor,freeze-blocks,length-64"
"""The published ladder, the default on one rank."""
ON_MANY_RANKS = "baseline,zero-1,zero-2,zero-3,checkpointing,offload-optimizer,offload-param"
"""The default on several ranks."""
_OF_DEEPSPEED = ("zero_stage", "optimizer_offload", "param_offload")
_NEAR = 3
"""Maximum number of suggestions for a wrong name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRun:
    """The settings of a rung's training."""

    strategy: Strategy
    """With micro-batch and accumulation filled in."""
    sequence_length: int
    """Tokens per sample."""

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step on one rank."""
        return self.strategy.samples_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One change, applied on top of those before it."""

    name: str
    """The user's name for it."""
    words: str
    """Its label in the table."""
    change: Callable[[LadderRun], LadderRun]

    @property
    def label(self) -> str:
        """Its label, with a "+" if it changes anything."""
        return self.words if self.name == BASELINE else f"+ {self.words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderStep:
    """One rung with its settings."""

    rung: Rung
    run: LadderRun

    @property
    def label(self) -> str:
        """The rung's label."""
        return self.rung.label


def baseline(*, batch_size: int, sequence_length: int, attention: str = "eager") -> LadderRun:
    """Return the ladder's starting point: the whole batch at once, fp32, the script's own AdamW.

    Args:
        batch_size: samples per optimizer step on each rank.
        sequence_length: tokens per sample.
        attention: transformers' attn_implementation.
    """
    strategy = Strategy(
        precision=Precision.FP32,
        micro_batch_size=batch_size,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        attention=attention,
    )
    return LadderRun(strategy=strategy, sequence_length=sequence_length)


def climb(
    rungs: Sequence[Rung],
    base: LadderRun,
    *,
    is_cumulative: bool,
    is_left_out: Callable[[LadderRun], bool] = lambda _: False,
) -> tuple[LadderStep, ...]:
    """Return each rung with its settings.

    Args:
        rungs: in the order in which they run; BASELINE returns to the start.
        base: the starting point.
        is_cumulative: whether a rung is on top of those before it, or of the baseline.
        is_left_out: whether the rungs below leave out the change of a run, as it can't run.

    Raises:
        UserError: a rung is incompatible with the batch size.
    """
    steps: list[LadderStep] = []
    below = base
    for rung in rungs:
        if rung.name == BASELINE or not is_cumulative:
            below = base
        run = rung.change(below)
        steps.append(LadderStep(rung=rung, run=run))
        below = below if is_left_out(run) else run
    return tuple(steps)


def launch_settings(run: LadderRun) -> dict[str, Any]:
    """Return the arguments of `zerofit.launch` that fix a run's strategy, by field of Strategy.

    Under DeepSpeed no offload is said too, as a configuration file may say another.
    """
    strategy, plain = run.strategy, Strategy()
    always = _OF_DEEPSPEED if strategy.engine is Engine.DEEPSPEED else ("engine",)
    values = {name: getattr(strategy, name) for name in FLAGS}
    changed = (name for name, value in values.items() if value != getattr(plain, name) and name != "engine")
    return {name: values[name] for name in (*always, *(name for name in changed if name not in always))}


def launch_flags(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command line with these settings: "--zero-stage", "2"."""
    for name, value in settings.items():
        flag = FLAGS[name]
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        elif isinstance(value, Lora):  # its alpha is twice the rank, as by default
            yield from (flag, "--lora-rank", str(value.rank))
        elif isinstance(value, SWITCHED):
            yield flag
        else:
            words = ",".join(value) if isinstance(value, tuple) else value
            yield from (flag, str(words.value if isinstance(words, Enum) else words))


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
    "checkpointing-offload": (
        "gradient checkpointing to the host",
        _strategy(gradient_checkpointing=True, activation_offload=True),
    ),
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


def _unknown(name: str) -> UserError:
    near = difflib.get_close_matches(name, rung_names(), n=_NEAR, cutoff=0.5)
    return UserError(
        "unknown-rung",
        f"there is no rung {name!r}" if name else "no rung is named",
        found=f"--rungs with {name!r}",
        why=f"the rungs are {', '.join(rung_names())}",
        fix=f"did you mean {' or '.join(near)}?" if near else f"name some, as --rungs {ON_ONE_RANK}",
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
