"""Rules on what a captured script can't take: the limits of zerofit/checking/constraints.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.constraints import constraints_of
from zerofit.checking.rule import (
    ACCELERATE,
    DEEPSPEED,
    REFUSED,
    Effect,
    Hit,
    Reproduction,
    Rule,
    Severity,
    declared,
    fails,
)
from zerofit.checking.situation import UnknownFact, known
from zerofit.core.command import Launcher, Route
from zerofit.core.overrides import FLAGS
from zerofit.core.plan import Topology
from zerofit.core.strategy import Strategy, show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.constraints import Pin
    from zerofit.checking.rule import Predicate
    from zerofit.checking.situation import Situation
    from zerofit.core.setting import Said

SHARDED = ("engine", "zero_stage", "optimizer_offload", "param_offload")
"""Fields that shard or offload what a rank holds."""
_STAGE3 = ("zero_stage", "param_offload")
_BATCHES = ("micro_batch_size", "gradient_accumulation_steps")
_OF_MODEL = ("freeze", "lora", "quantization")
_UNLOADED = Reproduction(
    outcome=Effect.REFUSED, not_reproduced="the harness's scripts load no checkpoint of transformers"
)
_TRANSFORMERS = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers"
_BNB = "https://huggingface.co/docs/transformers/en/quantization/bitsandbytes"
_ACCUMULATION = "https://huggingface.co/docs/accelerate/v1.15.0/usage_guides/gradient_accumulation"
_GATHERING = "https://deepspeed.readthedocs.io/en/stable/zero3.html#manual-parameter-coordination"
_UNCAPTURED = "what the script builds, which --capture shows"


def beyond_limit(name: str, fields: tuple[str, ...], *, is_of_zerofit: bool = True) -> Predicate:
    """Return a predicate that finds settings beyond the limit that a captured script sets under a rule.

    Args:
        name: the rule's id, by which a limit names it.
        fields: of Strategy, which the limit is about.
        is_of_zerofit: True if the limit only holds for `zerofit launch`, not for other launchers.
    """

    def find(situation: Situation) -> Iterator[Hit]:
        is_launched = situation.strategy is not None or situation.launcher is Launcher.ZEROFIT
        if is_of_zerofit and not is_launched:
            return
        said = {field: setting for field in fields if (setting := _said(situation, field)) is not None}
        if situation.capture is None:
            changes = [
                field for field, setting in said.items() if setting.value != getattr(Strategy(), field)
            ]
            if changes and situation.script is not None:
                raise UnknownFact(_UNCAPTURED)
            return
        pins = constraints_of(situation.capture, topology=situation.topology or Topology()).pins
        broken = [
            pin
            for pin in pins
            if pin.rule == name and pin.field in said and said[pin.field].value not in pin.values
        ]
        steps = said.get("gradient_accumulation_steps")
        if steps is not None and steps.value == situation.capture.gradient_accumulation_steps:
            # The script's own number; a loop that also counts passes itself makes more of them.
            broken = [pin for pin in broken if pin.field != "gradient_accumulation_steps"]
        if broken:
            yield _hit(situation, broken, said)

    return find


def _said(situation: Situation, field: str) -> Said[Any] | None:
    """Return what the user set a field to; None if nothing."""
    said = situation.settings.fields.get(field)
    if said is None and situation.strategy is None:
        said = getattr(situation.settings, field, None)
    return None if said is None or said.value is None else said


def _hit(situation: Situation, broken: list[Pin], said: dict[str, Said[Any]]) -> Hit:
    """Return one hit for all settings beyond a limit; files are named by the place of one of them."""
    placed = [pin for pin in broken if said[pin.field].place is not None]
    if placed:
        found = said[placed[0].field]
        return Hit(found=found.text, place=found.place, why=placed[0].why)
    names = dict.fromkeys(situation.settings.names.get(pin.field, FLAGS[pin.field]) for pin in broken)
    open_ = [show(value) for value in broken[0].values if value is not None] if len(broken) == 1 else []
    fix = f"leave out {' and '.join(names)}"
    return Hit(
        found=" and ".join(dict.fromkeys(said[pin.field].text for pin in broken)),
        fix=f"{fix}, or give it {' or '.join(open_)}" if len(open_) > 1 else fix,
        why=broken[0].why,
    )


def _limit(
    name: str,
    *fields: str,
    summary: str,
    why: str,
    fix: str,
    see: str,
    evidence: Reproduction = REFUSED,
    is_of_zerofit: bool = True,
) -> Rule:
    return Rule(
        id=name,
        severity=Severity.ERROR,
        summary=summary,
        why=why,
        fix=fix,
        see=see,
        evidence=evidence,
        find=beyond_limit(name, fields, is_of_zerofit=is_of_zerofit),
    )


_STAY_WHOLE = _limit(
    "batches-stay-whole",
    *_BATCHES,
    summary="this script's batches can't be split into smaller micro-batches",
    why="its model, loss or training loop computes over all samples of a batch",
    fix="leave out {micro_batch_size} and {gradient_accumulation_steps}",
    see="https://pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html",
)
_OF_UNKNOWN_SIZE = _limit(
    "batches-of-unknown-size",
    *_BATCHES,
    summary="a micro-batch needs batches of a known size",
    why="the size of the script's batches is unknown, so no part of them makes the same step",
    fix="leave out {micro_batch_size} and {gradient_accumulation_steps}",
    see=_ACCUMULATION,
    evidence=Reproduction(
        outcome=Effect.REFUSED, not_reproduced="the batches of the harness's scripts have a size"
    ),
)
_IN_EQUAL_PARTS = _limit(
    "batches-split-in-equal-parts",
    *_BATCHES,
    summary="a micro-batch is an equal part of the script's batch",
    why="zerofit splits each batch inside the forward pass, and weights all parts alike",
    fix="set {micro_batch_size} to a divisor of the script's batch, or leave it out",
    see=_ACCUMULATION,
)


@Rule(
    id="split-batch-not-divisible",
    severity=Severity.ERROR,
    summary="the script's batch does not divide over the ranks",
    why="accelerate gives each rank the same part of every batch",
    fix="use a number of ranks that divides the batch, or change the script's batch size",
    see=f"{ACCELERATE}/data_loader.py",
    evidence=REFUSED,
)
def _split_unevenly(situation: Situation) -> Iterator[Hit]:
    capture = situation.capture
    if capture is None or not capture.splits_batches or capture.micro_batch_size is None:
        return
    size = capture.micro_batch_size
    ranks = known(situation.topology, "the number of ranks").data_parallel_size
    if size % ranks:
        yield Hit(
            found=f"split_batches=True with batches of {size} samples, on {ranks} ranks",
            fix=f"use as many ranks as divide {size}, or change the script's batch size",
        )


@Rule(
    id="script-asks-for-cpu",
    severity=Severity.ERROR,
    summary="the script says that it runs on the CPU",
    why="it would not use the GPUs that are planned for",
    fix="leave that out of the script or its arguments, or launch with --cpu",
    see=f"{ACCELERATE}/state.py",
    evidence=REFUSED,
)
def _asks_for_cpu(situation: Situation) -> Iterator[Hit]:
    capture, topology = situation.capture, situation.topology
    if capture is None or not capture.asks_for_cpu or situation.launcher is not Launcher.ZEROFIT:
        return
    if not known(topology, "whether the ranks run on GPUs").on_cpu:
        is_trainer = capture.route is Route.TRAINER
        rehearses = situation.typed is not None and "on_cpu" in situation.typed
        out = "leave that out of the script or its arguments"
        yield Hit(
            found="TrainingArguments.use_cpu=True" if is_trainer else "Accelerator(cpu=True)",
            fix=f"{out}: --cpu runs it on the CPU all the same" if rehearses else None,
        )


_CHECKPOINTING_NEEDS_SUPPORT = _limit(
    "checkpointing-needs-support",
    "gradient_checkpointing",
    "checkpoint_every",
    "activation_offload",
    summary="this model does not support gradient checkpointing",
    why="only models with gradient_checkpointing_enable() can recompute their blocks",
    fix="leave out --gradient-checkpointing, --checkpoint-every and --offload-activations",
    see=f"{_TRANSFORMERS}/modeling_utils.py",
)
_LOCAL_SGD = _limit(
    "local-sgd-needs-pytorch",
    *SHARDED,
    summary="LocalSGD does not train under DeepSpeed or FSDP2",
    why="it averages whole models every few steps, and accelerate refuses it under both",
    fix="train on PyTorch alone (--engine native), or without LocalSGD",
    see=f"{ACCELERATE}/local_sgd.py",
    evidence=fails("LocalSGD is supported only for CPUs and GPUs"),
    is_of_zerofit=False,
)
_ONE_OPTIMIZER = _limit(
    "one-optimizer-per-engine",
    *SHARDED,
    summary="DeepSpeed's engine steps one optimizer",
    why="the script steps several, and the others would not see gradients",
    fix="train without DeepSpeed, or with one optimizer with several parameter groups",
    see=f"{ACCELERATE}/accelerator.py",
)
_PREPARED_OPTIMIZER = _limit(
    "engine-needs-prepared-optimizer",
    *SHARDED,
    summary="DeepSpeed's engine has to step the optimizer",
    why="the script's does not go through prepare(), so its step() would find no gradients",
    fix="pass the optimizer to prepare(), or train without DeepSpeed",
    see=f"{ACCELERATE}/accelerator.py",
)
_MODEL_ALONE = _limit(
    "engine-steps-the-model-alone",
    *SHARDED,
    summary="DeepSpeed's engine only steps parameters of the model",
    why="the optimizer has others beside them, such as those of a loss",
    fix="train without DeepSpeed, or make the others a part of the model",
    see=f"{DEEPSPEED}/runtime/engine.py",
)
_ELEMENT_WISE = _limit(
    "zero-needs-element-wise-optimizer",
    *SHARDED,
    summary="ZeRO needs an optimizer that steps each element by itself",
    why="ZeRO passes it flat pieces of tensors, and this one looks at whole ones",
    fix="train without ZeRO, or with AdamW",
    see=f"{DEEPSPEED}/runtime/zero/stage_1_and_2.py",
)
_MADE_BY_DEEPSPEED = _limit(
    "deepspeed-makes-parts-of-script",
    "engine",
    summary="the script's DeepSpeed configuration makes parts that no other engine makes",
    why="its scheduler or optimizer is only in that file",
    fix="leave out --engine native, or create them in the script",
    see="https://huggingface.co/docs/transformers/deepspeed#optimizer-and-scheduler",
)
_OPTION_WITHOUT_REPLACEMENT = _limit(
    "optimizer-option-without-replacement",
    "optimizer",
    "optimizer_offload",
    summary="no replacement has this option of the script's optimizer",
    why="neither bitsandbytes nor DeepSpeed's CPU Adam has amsgrad or maximize, and training would differ",
    fix="leave out --optimizer and {optimizer_offload}, or the option in the script",
    see=f"{DEEPSPEED}/ops/adam/cpu_adam.py",
)
_ONE_TO_REPLACE = _limit(
    "replacement-needs-one-optimizer",
    "optimizer",
    summary="--optimizer replaces the script's only optimizer",
    why="the script has several or none, and the flag names none of them",
    fix="leave out --optimizer",
    see="https://huggingface.co/docs/accelerate/package_reference/accelerator#accelerate.Accelerator.prepare",
)
_QUANTIZED_PRECISION = _limit(
    "quantized-base-sets-precision",
    "precision",
    summary="a quantized base sets the precision",
    why="its layers compute in the format that they were made for",
    fix="leave out --mixed-precision, or change bnb_4bit_compute_dtype in the script",
    see=_BNB,
    evidence=_UNLOADED,
)
_ONE_MODEL = _limit(
    "changes-need-one-model",
    *_OF_MODEL,
    summary="changes to the model need one model",
    why="the script prepares several, and a flag names none of them",
    fix="leave out --freeze, --lora and --qlora, and make the change in the script",
    see="https://huggingface.co/docs/accelerate/usage_guides/deepspeed_multiple_model",
)
_HAS_ADAPTERS = _limit(
    "script-has-adapters",
    *_OF_MODEL,
    summary="the script adapts or quantizes its model itself",
    why="adapters beside its own, or a part of them frozen, would train something else",
    fix="leave out --freeze, --lora and --qlora",
    see="https://huggingface.co/docs/peft/developer_guides/quantization",
)
_FROM_PRETRAINED = _limit(
    "quantization-needs-from-pretrained",
    "quantization",
    summary="weights are quantized by from_pretrained()",
    why="transformers quantizes them while it loads them, and this model is created otherwise",
    fix="leave out --qlora, or load the model by from_pretrained()",
    see=_BNB,
)
_ATTENTION = _limit(
    "attention-needs-transformers",
    "attention",
    summary="--attention selects one of transformers' kernels",
    why="the script's model has its own attention",
    fix="leave out --attention",
    see="https://huggingface.co/docs/transformers/attention_interface",
)
_LIGER = _limit(
    "liger-needs-transformers",
    "liger",
    summary="Liger's kernels replace modules of transformers",
    why="the script's model has none of them",
    fix="leave out --liger",
    see="https://github.com/linkedin/Liger-Kernel",
)
_QUANTIZED = _limit(
    "quantized-script-below-zero3",
    *_STAGE3,
    summary="a base that the script quantizes can't be partitioned by ZeRO-3",
    why="a quantized base at stage 3 was not measured on GPUs",
    fix="set {zero_stage} to 2 or less",
    see=_BNB,
    evidence=_UNLOADED,
)
_AVERAGED = _limit(
    "averaged-weights-below-zero3",
    *_STAGE3,
    summary="a moving average of the weights needs whole weights",
    why="at stage 3 each rank has a shard of them, of which the average would be taken",
    fix="set {zero_stage} to 2 or less",
    see=_GATHERING,
)
_BY_HAND = _limit(
    "weights-by-hand-below-zero3",
    *_STAGE3,
    summary="a script that reads or writes weights in its loop needs whole weights",
    why="at stage 3 they are empty outside the forward and backward pass",
    fix="set {zero_stage} to 2 or less, or gather them in the script",
    see=_GATHERING,
)
_UNPREPARED = _limit(
    "unprepared-models-below-zero3",
    *_STAGE3,
    summary="at ZeRO-3 every model of transformers has to be prepared",
    why="transformers partitions each on creation, and only an engine gathers its weights",
    fix="set {zero_stage} to 2 or less, or pass all models to prepare()",
    see="https://huggingface.co/docs/transformers/deepspeed#non-trainer-integration",
)
_LENGTHS = _limit(
    "grouping-needs-lengths",
    "group_by_length",
    summary="--group-by-length needs the samples' lengths",
    why="batches of like lengths are made before any sample is read",
    fix="leave out --group-by-length, or add a column `length` to the dataset",
    see=f"{_TRANSFORMERS}/trainer_pt_utils.py",
)
_SHUFFLED = _limit(
    "grouping-needs-shuffled-samples",
    "group_by_length",
    summary="--group-by-length needs samples in no particular order",
    why="it changes the order of samples, which this script sets itself",
    fix="leave out --group-by-length, or shuffle in the script",
    see=f"{_TRANSFORMERS}/trainer_pt_utils.py",
)

RULES = declared(globals())
