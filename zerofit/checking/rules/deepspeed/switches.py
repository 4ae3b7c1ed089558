"""Rules on switches in ds_config.json that exclude or need each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import (
    ACCELERATE,
    DEEPSPEED,
    DIFFERS,
    Hit,
    Rule,
    Severity,
    declared,
    fails,
    hit_at,
    ignored,
)
from zerofit.checking.situation import is_read_by_others, stage_of
from zerofit.configs.document import SetValue, say
from zerofit.core.strategy import ZeroStage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document


_SOURCE = f"{DEEPSPEED}/runtime"
_ZERO = "zero_optimization"
_ON_TEXTS = {"true", "t", "yes", "y", "on", "1"}
_MASTERS = (("fp16", "fp16_master_weights_and_grads"), ("bf16", "bf16_master_weights_and_grads"))
_QUANTIZED = tuple(
    (_ZERO, f"zero_quantized_{what}") for what in ("weights", "nontrainable_weights", "gradients")
)
_SECONDARY = (_ZERO, "zero_hpz_partition_size")
_STATES = ("bf16", "bf16_optimizer_states")
_BELOW_3 = (ZeroStage.NOTHING, ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS)


@Rule(
    id="zero-stage-is-a-number",
    severity=Severity.ERROR,
    summary="accelerate and Trainer don't recognize ZeRO-3 as a string",
    why='DeepSpeed converts "3" to 3 and shards the parameters, but they compare it with the number: '
    "models are loaded whole, and saved weights are empty",
    fix="write the stage as a number",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails("no weights"),
)
def _stage_as_text(situation: Situation) -> Iterator[Hit]:
    document, path = situation.file, (_ZERO, "stage")
    value = document.value(*path)
    if isinstance(value, str) and value.strip() == "3" and is_read_by_others(situation):
        edit = SetValue(document=document.name, path=path, value=3)
        yield hit_at(document, path, found=f'{_ZERO}.stage="{value}", a string', edits=(edit,))


@Rule(
    id="deepspeed-fp16-and-bf16",
    severity=Severity.ERROR,
    summary="DeepSpeed trains either in fp16 or in bf16",
    why="a parameter has one dtype",
    fix="switch one of them off",
    see=f"{_SOURCE}/config.py",
    evidence=fails("bfloat16 and fp16 modes cannot be simultaneously enabled"),
)
def _two_formats(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    # The old name only takes effect if the new one is missing.
    bf16 = "bf16" if document.value("bf16") is not None else "bfloat16"
    if _is_on(document, "fp16", "enabled") and _is_on(document, bf16, "enabled"):
        yield hit_at(document, ("fp16", "enabled"), say(document, bf16, "enabled"))


def _is_on(document: Document, *path: str) -> bool:
    value = document.value(*path)
    return value.lower() in _ON_TEXTS if isinstance(value, str) else value in (True, 1)


@Rule(
    id="deepspeed-loss-scale-limits",
    severity=Severity.ERROR,
    summary="dynamic loss scaling needs a window and a minimum greater than 0",
    why="the scale is raised after each window, and must not fall to 0",
    fix="give a whole number greater than 0",
    see=f"{_SOURCE}/precision_config.py",
    evidence=fails("min_loss_scale must be > 0"),
)
def _loss_scale(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    is_dynamic = document.value("fp16", "loss_scale") in (None, 0, "0", "auto")
    if not (is_dynamic and _is_on(document, "fp16", "enabled")):
        return
    for name in ("loss_scale_window", "min_loss_scale"):
        value = document.value("fp16", name)
        if isinstance(value, (int, float)) and value <= 0:
            yield hit_at(document, ("fp16", name))


@Rule(
    id="partial-offload-needs-zero3",
    severity=Severity.ERROR,
    summary="partial offload of optimizer states needs ZeRO-3",
    why="lower stages offload all states or none",
    fix="set {zero_stage} to 3, or leave out ratio",
    see=f"{_SOURCE}/zero/config.py",
    evidence=fails("Partial offloading only supported for ZeRO Stage 3"),
)
def _partial_offload(situation: Situation) -> Iterator[Hit]:
    path = (_ZERO, "offload_optimizer", "ratio")
    ratio = situation.file.value(*path)
    if isinstance(ratio, (int, float)) and ratio < 1:
        yield from _by_stage(situation, path, *_BELOW_3)


def _by_stage(situation: Situation, path: tuple[str, ...], *stages: ZeroStage) -> Iterator[Hit]:
    """Yield a hit for a key that is set, if the ZeRO stage is one of these."""
    stage = stage_of(situation)
    if stage.value in stages:
        yield hit_at(situation.file, path, stage.text)


@Rule(
    id="no-grad-norm-needs-zero1-or-2",
    severity=Severity.ERROR,
    summary="compute_grad_norm can only be disabled with ZeRO-1 and ZeRO-2",
    why="the optimizers of the other stages always compute the norm, and refuse the key",
    fix="set {zero_stage} to 1 or 2, or leave out compute_grad_norm",
    see=f"{_SOURCE}/zero/config.py",
    evidence=fails("compute_grad_norm=false is supported only with ZeRO Stage 1 or 2"),
)
def _grad_norm(situation: Situation) -> Iterator[Hit]:
    path = (_ZERO, "compute_grad_norm")
    if _is_off(situation.file, *path):
        yield from _by_stage(situation, path, ZeroStage.NOTHING, ZeroStage.PARAMETERS)


def _is_off(document: Document, *path: str) -> bool:
    return document.value(*path) in (False, 0) and document.at(*path) is not None


@Rule(
    id="low-precision-masters-need-zero",
    severity=Severity.ERROR,
    summary="16-bit master weights and optimizer states need ZeRO-1 or higher",
    why="only ZeRO's optimizers support it",
    fix="set {zero_stage} to 1, 2 or 3, or keep them in fp32",
    see=f"{_SOURCE}/config.py",
    evidence=fails("is only supported with ZeRO Stage 1, 2, or 3"),
)
def _low_precision_masters(situation: Situation) -> Iterator[Hit]:
    for path in (*_MASTERS, _STATES):
        if _is_on(situation.file, *path):
            yield from _by_stage(situation, path, ZeroStage.NOTHING)


@Rule(
    id="bf16-states-need-bf16-masters",
    severity=Severity.ERROR,
    summary="optimizer states in bf16 need master weights in bf16",
    why="DeepSpeed has no optimizer with fp32 weights and bf16 states",
    fix="set bf16.bf16_master_weights_and_grads to true, or leave out bf16_optimizer_states",
    see=f"{_SOURCE}/config.py",
    evidence=fails("requires bf16_master_weights_and_grads"),
)
def _states_without_masters(situation: Situation) -> Iterator[Hit]:
    document, masters = situation.file, _MASTERS[1]
    if not _is_on(document, *_STATES) or _is_on(document, *masters):
        return
    if stage_of(situation).value is not ZeroStage.NOTHING:
        yield hit_at(document, _STATES, say(document, *masters))


@Rule(
    id="summed-gradients-below-zero3",
    severity=Severity.ERROR,
    summary="gradients can't be summed over ranks with ZeRO-3, ZenFlow or DeepCompile",
    why="these average gradients in their own communication",
    fix="set gradient_allreduce_op to mean",
    see=f"{_SOURCE}/config.py",
    evidence=fails("is not supported with ZeRO stage 3"),
)
def _summed_gradients(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    if str(document.value("gradient_allreduce_op")).lower() != "sum":
        return
    if document.value(_ZERO, "zenflow") is not None:
        yield hit_at(document, ("gradient_allreduce_op",), f"{_ZERO}.zenflow")
    elif _is_on(document, "compile", "deepcompile"):
        yield hit_at(document, ("gradient_allreduce_op",), say(document, "compile", "deepcompile"))
    else:
        yield from _by_stage(situation, ("gradient_allreduce_op",), ZeroStage.PARAMETERS)


@Rule(
    id="prescaled-gradients-with-zero2",
    severity=Severity.ERROR,
    summary="ZeRO-2 can't scale gradients before it reduces them",
    why="its reduce-scatter averages itself, and refuses pre-scaled gradients",
    fix="leave them out, or set zero_optimization.reduce_scatter to false",
    see=f"{_SOURCE}/zero/stage_1_and_2.py",
    evidence=fails("pre-scale gradients is not yet supported"),
)
def _scaled_before_reduce(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    factor = document.value("gradient_predivide_factor")
    is_set = {
        "prescale_gradients": document.value("prescale_gradients") is True,
        "gradient_predivide_factor": isinstance(factor, (int, float)) and factor != 1,
    }
    for name in is_set:
        if is_set[name] and not _is_off(document, _ZERO, "reduce_scatter"):
            yield from _by_stage(situation, (name,), ZeroStage.GRADIENTS)


@Rule(
    id="zeropp-needs-zero3",
    severity=Severity.WARNING,
    summary="ZeRO++ has no effect below ZeRO-3",
    why="only ZeRO-3's optimizer quantizes weights and gradients or keeps secondary shards",
    fix="set {zero_stage} to 3, or leave it out",
    see=f"{_SOURCE}/zero/stage3.py",
    evidence=ignored(("partitions_parameters", False)),
)
def _quantized_below_zero3(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    shards = document.value(*_SECONDARY)
    is_set = isinstance(shards, int) and shards > 1
    on = [path for path in _QUANTIZED if _is_on(document, *path)] + ([_SECONDARY] if is_set else [])
    for path in on:
        yield from _by_stage(situation, path, *_BELOW_3)


@Rule(
    id="negative-norm-clips-nothing",
    severity=Severity.WARNING,
    summary="a negative gradient_clipping disables clipping",
    why="DeepSpeed only clips if the value is greater than 0, and silently ignores negative ones",
    fix="set the maximum norm, or 0 to disable clipping",
    see=f"{_SOURCE}/zero/stage_1_and_2.py",
    evidence=DIFFERS,
)
def _clips_nothing(situation: Situation) -> Iterator[Hit]:
    norm = situation.file.value("gradient_clipping")
    if isinstance(norm, (int, float)) and norm < 0:
        yield hit_at(situation.file, ("gradient_clipping",))


RULES = declared(vars())
