"""Rules on values in ds_config.json: types, bounds, batch sizes and "auto"."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.rule import (
    ACCELERATE,
    DEEPSPEED,
    DEEPSPEED_DOCS,
    Hit,
    Rule,
    Severity,
    declared,
    fails,
    hit_at,
    ignored,
)
from zerofit.checking.situation import entries_of, is_read_by_others, known
from zerofit.configs.document import SetValue, say, show
from zerofit.configs.schema import ValueKind, expected, is_in_range, is_right_type
from zerofit.core.command import Route
from zerofit.core.setting import Confidence
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document
    from zerofit.configs.schema import FoundKey, Key


_FALSE_TEXTS = {"false", "no", "off", "0"}
_FAILS_ON_TEXT = ("wall_clock_breakdown",)
"""Operands of a bitwise or, which fails on strings."""
_NATIVE_ONLY = ("steps_per_print",)
"""accelerate, and therefore Trainer, overwrites it."""
TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
# accelerate/accelerator.py, _prepare_deepspeed; accelerate/utils/dataclasses.py, DeepSpeedPlugin
_BY_ACCELERATE = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "steps_per_print",
        "fp16.enabled",
        "bf16.enabled",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
    }
)
# transformers/integrations/deepspeed.py, HfTrainerDeepSpeedConfig; accelerate does the rest
_BY_TRAINER = _BY_ACCELERATE | {"optimizer.params.betas", "optimizer.params.eps"}
_RESOLVED_BY = {Route.ACCELERATE: _BY_ACCELERATE, Route.TRAINER: _BY_TRAINER}
_TOTAL = "total_num_steps"
_WHY_NO_DUMMY = (
    "prepare() fills it in from the arguments of accelerate.utils.DummyOptim or DummyScheduler, and the "
    "script passes none that has it"
)
_NATIVE_AUTO_KEYS = frozenset(
    {
        "data_types.keep_in_fp32_modules",
        "pipeline.stages",
        *(f"expert_parallel.{name}" for name in ("score_apply", "combine_impl", "row_weighting_impl")),
        *(f"expert_parallel.{name}" for name in ("score_func", "top_k", "routed_scaling_factor")),
    }
)
"""DeepSpeed itself supports "auto" there."""
_SWITCHES = ("stage", "enabled", "device")
"""Keys that switch whole features; for sizes and the like the default is as good as "auto"."""


@Rule(
    id="deepspeed-value-refused",
    severity=Severity.ERROR,
    summary="DeepSpeed can't use this value",
    why="it has the wrong type for the key, or is out of range",
    fix="use a valid value for the key",
    see=DEEPSPEED_DOCS,
    evidence=fails("Input should be 0, 1, 2"),
)
def _refused(situation: Situation) -> Iterator[Hit]:
    # Values that depend on the route come last, so that certain findings are reported anyway.
    wrong = sorted(_wrong_values(situation), key=lambda value: value[2].path[0] in _NATIVE_ONLY)
    for document, key, found in wrong:
        if found.path[0] in _NATIVE_ONLY and is_read_by_others(situation):
            continue
        edits = _repair(document, key, found)
        yield hit_at(document, found.path, fix=_fix(key, edits), edits=edits)


def corrected_paths(situation: Situation) -> frozenset[tuple[str, ...]]:
    """Return the keys whose text has a clear meaning that DeepSpeed does not read, such as "8" for 8.

    Findings of this file give the one fix of such a key, and others can compare it once it can be read.
    """
    if situation.schemas is None:
        return frozenset()
    numbers = (
        found.path for document, key, found in _wrong_values(situation) if _repair(document, key, found)
    )
    return frozenset((*numbers, *(found.path for _, found in _texts_for_bool(situation))))


def _wrong_values(situation: Situation) -> Iterator[tuple[Document, Key, FoundKey]]:
    for document, key, found in _values(situation):
        is_right = is_right_type(key, found.value) and is_in_range(key, found.value)
        if not is_right and not _is_unchecked(key, found.value):
            yield document, key, found


def _texts_for_bool(situation: Situation) -> Iterator[tuple[Document, FoundKey]]:
    """Yield each text that means false, and counts as true."""
    for document, key, found in _values(situation):
        is_text = isinstance(found.value, str) and _is_unchecked(key, found.value)
        if is_text and found.value.lower() in _FALSE_TEXTS:
            yield document, found


def _values(situation: Situation) -> Iterator[tuple[Document, Key, FoundKey]]:
    """Yield each value of a known key that DeepSpeed itself will see."""
    document = situation.deepspeed
    # In autotuning, DeepSpeed accepts lists of values, and other keys.
    if document is None or document.value("autotuning", "enabled") is True:
        return
    for _, found in entries_of(situation):
        if found.key is not None and found.value != "auto":
            yield document, found.key, found


def _is_unchecked(key: Key, value: object) -> bool:
    """Return True if DeepSpeed accepts any value for a boolean, and uses its truth value."""
    fails = key.name in _FAILS_ON_TEXT and isinstance(value, str)
    return key.kinds == (ValueKind.BOOL,) and not key.converts and not fails


def _fix(key: Key, edits: tuple[SetValue, ...]) -> str:
    if not edits:
        return f"give {expected(key)}"
    value = edits[0].value
    return f"write {value}" if isinstance(value, str) else f"write {show(value)} without quotes"


def _repair(document: Document, key: Key, found: FoundKey) -> tuple[SetValue, ...]:
    """Return the edit to the right type for a value whose meaning is clear."""
    if not isinstance(found.value, str):
        return ()
    text = found.value.strip().lower()
    meant: str | int | float | bool | None = None
    if text in key.choices:
        meant = text
    elif key.kinds == (ValueKind.BOOL,):
        meant = {"false": False, "true": True}.get(text)
    elif ValueKind.INTEGER in key.kinds or ValueKind.NUMBER in key.kinds:
        meant = _number(text)
    if meant is None or not is_right_type(key, meant) or not is_in_range(key, meant):
        return ()
    return (SetValue(document=document.name, path=found.path, value=meant),)


def _number(text: str) -> int | float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number


@Rule(
    id="deepspeed-text-is-true",
    severity=Severity.ERROR,
    summary='the string "false" counts as true',
    why="DeepSpeed does not check the type of this key, and in Python any nonempty string is true",
    fix="write false without quotes",
    see=f"{DEEPSPEED}/runtime/config_utils.py",
    evidence=fails("pre-scale gradients is not yet supported"),
)
def _text_for_bool(situation: Situation) -> Iterator[Hit]:
    for document, found in _texts_for_bool(situation):
        edit = SetValue(document=document.name, path=found.path, value=False)
        text = f'{".".join(found.path)}="{found.value}"'
        yield hit_at(document, found.path, found=text, edits=(edit,))


@Rule(
    id="deepspeed-batch-sizes-disagree",
    severity=Severity.ERROR,
    summary="train_batch_size is not micro batch size x accumulation steps x data-parallel ranks",
    why="DeepSpeed computes a missing one of the three, and refuses to start if they contradict each other",
    fix="leave out train_batch_size, or set it to the product",
    see=f"{DEEPSPEED}/runtime/config.py",
    evidence=fails("Check batch related parameters"),
)
def _disagreeing(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    train = size_of(document, TRAIN)
    if train is None or _has_unknown_size(document):
        return
    given = [name for name in (MICRO, STEPS) if document.value(name) is not None]
    divisor = math.prod(size_of(document, name) or 1 for name in given)
    shown = [" and ".join(say(document, name) for name in given)] if given else []
    if train % divisor:
        yield hit_at(document, (TRAIN,), *shown)
    elif given or train > 1:
        num_ranks = _num_data_parallel_ranks(situation)
        is_exact = len(given) == 2 or (
            given == [MICRO] and _accumulation_defaults_to_1(situation, train, divisor)
        )
        is_right = train == divisor * num_ranks if is_exact else train % (divisor * num_ranks) == 0
        if not is_right:
            hit = hit_at(document, (TRAIN,), *shown)
            fix = f"leave out train_batch_size, or set it to {divisor * num_ranks}" if is_exact else ""
            ranks = f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'}"
            yield replace(hit, found=f"{hit.found} on {ranks}", fix=fix or hit.fix)


def _accumulation_defaults_to_1(situation: Situation, train: int, micro: int) -> bool:
    """Return True if a missing gradient_accumulation_steps defaults to 1 instead of being derived.

    accelerate sets 1 before DeepSpeed sees the file: accelerate/utils/dataclasses.py, DeepSpeedPlugin.
    """
    if train == micro * _num_data_parallel_ranks(situation):
        return True
    return is_read_by_others(situation)


def _num_data_parallel_ranks(situation: Situation) -> int:
    topology = known(situation.topology, "the number of ranks")
    cuts = (situation.file.value("tensor_parallel", "autotp_size") or 0) not in (0, 1)
    splits = cuts or situation.file.value("sequence_parallel_size") not in (None, 1)
    return known(None if splits else topology.world_size, "the data-parallel size")


def _has_unknown_size(document: Document) -> bool:
    """Return True if a size comes from elsewhere, or is invalid, which another rule reports."""
    return any(
        document.value(name) is not None and size_of(document, name) is None for name in (MICRO, STEPS)
    )


def size_of(document: Document, name: str) -> int | None:
    """Return a batch size or number of steps in a file; None if it is missing, "auto" or invalid."""
    value = document.value(name)
    is_size = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1 and value % 1 == 0
    )
    return int(value) if is_size else None


@Rule(
    id="deepspeed-batch-size-missing",
    severity=Severity.ERROR,
    summary="DeepSpeed needs a batch size",
    why="train_micro_batch_size_per_gpu has no default, and nothing else sets it",
    fix="set train_micro_batch_size_per_gpu",
    see=f"{DEEPSPEED}/runtime/config.py",
    evidence=fails("Either train_batch_size or train_micro_batch_size_per_gpu"),
)
def _missing(situation: Situation) -> Iterator[Hit]:
    document = situation.deepspeed
    if document is None or document.value(TRAIN) is not None or document.value(MICRO) is not None:
        return
    # Scripts that pass their configuration to DeepSpeed themselves often add the batch size first.
    confidence = Confidence.LIKELY if situation.route in (None, Route.NATIVE) else Confidence.CERTAIN
    yield Hit(
        found=f"{document.name} with {say(document, TRAIN)} and {say(document, MICRO)}",
        confidence=confidence,
    )


@Rule(
    id="deepspeed-auto-unresolved",
    severity=Severity.ERROR,
    summary='nothing replaces "auto" for this key',
    why="accelerate and Trainer fill in a few keys each; DeepSpeed itself uses the string as the value",
    fix="write the value",
    see=f"{ACCELERATE}/utils/dataclasses.py",
    evidence=fails("not found in kwargs"),
)
def _unresolved(situation: Situation) -> Iterator[Hit]:
    unresolved = [
        (document, found, {route for route in Route if not _is_resolved(found, route)})
        for document, found in _autos(situation)
    ]
    # Values that depend on the route come last, so that certain findings are reported anyway.
    for document, found, routes in unresolved:
        if routes == set(Route):
            yield hit_at(document, found.path)
    for document, found, routes in unresolved:
        if routes and routes != set(Route) and known(situation.route, "the library that reads it") in routes:
            # A written one would have to fit any number of ranks, also before they have met.
            fix = "leave it out: DeepSpeed computes it" if found.path == (TRAIN,) else None
            yield hit_at(document, found.path, fix=fix)
    for document, found, routes in unresolved:
        if Route.ACCELERATE not in routes and (sure := _lacks_dummy(situation, found)) is not None:
            yield hit_at(document, found.path, why=_WHY_NO_DUMMY, confidence=sure)


def _lacks_dummy(situation: Situation, found: FoundKey) -> Confidence | None:
    """Return how certain it is that prepare() has no placeholder to fill a key in from; None if unknown."""
    script = situation.script
    if situation.route is not Route.ACCELERATE or script is None or found.path[1:2] != ("params",):
        return None
    calls = [call for call in script.find(Action.PREPARE) if call.num_models]
    if not calls or any(call.has_unknown for call in calls):
        return None
    is_scheduler = found.path[0] == "scheduler"
    dummies = [
        prepared
        for call in calls
        for prepared in call.prepared
        if prepared.is_scheduler is is_scheduler and (prepared.is_dummy or not prepared.is_certain)
    ]
    if any(
        not prepared.is_dummy or found.path[-1] != _TOTAL or prepared.given & {_TOTAL, "**"}
        for prepared in dummies
    ):
        return None
    return Confidence.CERTAIN if any(call.is_in_each_run for call in calls) else Confidence.LIKELY


def _is_resolved(found: FoundKey, route: Route) -> bool:
    path = ".".join(found.path)
    if route is Route.NATIVE:
        return found.section.drops_auto or path in _NATIVE_AUTO_KEYS
    return path in _RESOLVED_BY[route]


def _autos(situation: Situation) -> Iterator[tuple[Document, FoundKey]]:
    for document, found in entries_of(situation):
        if found.key is not None and found.value == "auto":
            yield document, found


@Rule(
    id="deepspeed-auto-switches-off",
    severity=Severity.ERROR,
    summary='without accelerate or Trainer, "auto" switches the feature off',
    why="DeepSpeed itself treats the key as missing: stage 0, enabled false, device none",
    fix="write the value",
    see=f"{DEEPSPEED}/runtime/config_utils.py",
    evidence=ignored(("zero_stage", 0)),
)
def _natively_default(situation: Situation) -> Iterator[Hit]:
    for document, found in _autos(situation):
        is_switch = found.section.drops_auto and found.path[-1] in _SWITCHES
        if is_switch and not is_read_by_others(situation):
            yield hit_at(document, found.path)


REFUSED_BY_DEEPSPEED = (_refused,)
"""Rules on files that DeepSpeed refuses, which plan and launch refuse too."""
RULES = declared(vars())
