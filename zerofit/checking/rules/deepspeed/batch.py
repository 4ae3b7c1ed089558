"""Rules of the three batch sizes in ds_config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Confidence, Evidence, Example, Hit, Outcome, Rule, Severity
from zerofit.checking.situation import known
from zerofit.configs.quote import say
from zerofit.core.command import Route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document

_SOURCE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/config.py"
_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_ZERO2 = {"zero_optimization": {"stage": 2}}


def _disagreeing(situation: Situation) -> Iterator[Hit]:
    document = situation.deepspeed
    train = _number(document, _TRAIN) if document else None
    if document is None or train is None or _has_open_part(document):
        return
    given = [name for name in (_MICRO, _STEPS) if document.value(name) is not None]
    divisor = _product(document, given)
    words = [say(document, name) for name in (_TRAIN, *given)]
    entry = document.at(_TRAIN)
    place = document.place(entry.key_span) if entry else None
    if train % divisor:
        yield Hit(found=_with(words), place=place)
    elif given or train > 1:
        num_ranks = _num_data_parallel_ranks(situation)
        is_exact = len(given) == 2 or (
            given == [_MICRO] and _accumulation_defaults_to_1(situation, train, divisor)
        )
        is_right = train == divisor * num_ranks if is_exact else train % (divisor * num_ranks) == 0
        if not is_right:
            yield Hit(
                found=f"{_with(words)} on {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}", place=place
            )


def _accumulation_defaults_to_1(situation: Situation, train: int, micro: int) -> bool:
    """Return whether a missing gradient_accumulation_steps is 1, in place of what makes the sizes agree.

    accelerate writes a 1 before DeepSpeed sees the file: accelerate/utils/dataclasses.py, DeepSpeedPlugin.
    """
    if train == micro * _num_data_parallel_ranks(situation):
        return True
    return known(situation.route, "who reads the file") is not Route.NATIVE


def _num_data_parallel_ranks(situation: Situation) -> int:
    topology = known(situation.topology, "how many ranks will run it")
    document = situation.deepspeed
    splits = document is not None and (
        (document.value("tensor_parallel", "autotp_size") or 0) not in (0, 1)
        or document.value("sequence_parallel_size") not in (None, 1)
    )
    return known(None if splits else topology.world_size, "how many ranks take different samples")


def _has_open_part(document: Document) -> bool:
    """Return whether a size comes from elsewhere, or is no size at all, which another rule says."""
    return any(
        document.value(name) is not None and _number(document, name) is None for name in (_MICRO, _STEPS)
    )


def _product(document: Document, names: list[str]) -> int:
    product = 1
    for name in names:
        product *= _number(document, name) or 1
    return product


def _number(document: Document, name: str) -> int | None:
    value = document.value(name)
    is_size = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1 and value % 1 == 0
    )
    return int(value) if is_size else None


def _with(words: list[str]) -> str:
    return " with ".join([words[0], " and ".join(words[1:])]) if words[1:] else words[0]


def _missing(situation: Situation) -> Iterator[Hit]:
    document = situation.deepspeed
    if document is None or document.value(_TRAIN) is not None or document.value(_MICRO) is not None:
        return
    # Scripts that hand their configuration to DeepSpeed themselves often add the batch size first.
    confidence = Confidence.LIKELY if situation.route in (None, Route.NATIVE) else Confidence.CERTAIN
    yield Hit(
        found=f"{document.name} with {say(document, _TRAIN)} and {say(document, _MICRO)}",
        confidence=confidence,
    )


RULES = (
    Rule(
        id="deepspeed-batch-sizes-disagree",
        severity=Severity.ERROR,
        summary="train_batch_size is not micro batch size x accumulation steps x data-parallel ranks",
        why="DeepSpeed computes what is missing of the three, and refuses to start where they disagree",
        fix="leave out train_batch_size, or set it to the product",
        see=_SOURCE,
        find=_disagreeing,
        bad=Example(deepspeed={_TRAIN: 10, _MICRO: 4, _STEPS: 2, **_ZERO2}, route=Route.NATIVE),
        good=Example(deepspeed={_MICRO: 4, _STEPS: 2, **_ZERO2}, route=Route.NATIVE),
        evidence=Evidence(outcome=Outcome.FAILS, says="Check batch related parameters"),
    ),
    Rule(
        id="deepspeed-batch-size-missing",
        severity=Severity.ERROR,
        summary="DeepSpeed needs a batch size",
        why="it has no default for train_micro_batch_size_per_gpu, and nobody else fills it in",
        fix="set train_micro_batch_size_per_gpu",
        see=_SOURCE,
        find=_missing,
        bad=Example(deepspeed=_ZERO2, route=Route.ACCELERATE),
        good=Example(deepspeed={_MICRO: 4, **_ZERO2}, route=Route.ACCELERATE),
        evidence=Evidence(
            outcome=Outcome.FAILS, says="Either train_batch_size or train_micro_batch_size_per_gpu"
        ),
    ),
)
