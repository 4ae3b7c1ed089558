"""Constraints: the values of strategy fields that a captured script allows, each limit with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.core.command import Route
from zerofit.core.optimizers.lookup import REPLACEMENT_IDS, optimizer_of_class
from zerofit.core.optimizers.table import NOT_TAKEN_OVER
from zerofit.core.strategy import Engine, OffloadDevice, OptimizerName, Precision, Strategy, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.core.capture import Capture, CapturedOptimizer
    from zerofit.core.overrides import Overrides
    from zerofit.core.plan import Topology

UNCHANGED = {
    "freeze": (),
    "lora": None,
    "quantization": None,
    "attention": None,
    "liger": False,
    "checkpoint_every": 1,
    "activation_offload": False,
    "group_by_length": False,
}
"""Fields that change the model or the batches, with the value that changes nothing."""
_OF_ONE_MODEL = ("freeze", "lora", "quantization")
_LOOPS = ("train", "_inner_training_loop", "training_step")
"""Methods of Trainer that get a whole batch: an override may use all its samples."""
_HANDING_ON = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer")
"""Trainers of TRL whose training_step passes the batch unchanged to transformers' own (trl 1.16,
trl/trainer/sft_trainer.py and its neighbours). Its other trainers slice batches that they generate."""
_COMPARING = "sentence_transformers"
"""Its losses compare the samples of a batch; those named Cached* run the model in parts themselves, with a
backward pass of their own (sentence_transformers 6.2)."""
_SHOWN = 3
"""How many names a reason lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The allowed values of one Strategy field."""

    field: str
    values: tuple[Any, ...]
    """The script's own value first."""
    why: str
    """One phrase."""
    rule: str = ""
    """Id of the rule that states the limit; empty for a habit, which is no limit."""
    is_habit: bool = False
    """True if a flag may override it: it is the script's choice, not a limit."""
    also_by: tuple[str, ...] = ()
    """Other fields whose flags override it, if it is a habit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """All limits of one script."""

    pins: tuple[Pin, ...] = ()

    def beside(self, said: Overrides) -> Constraints:
        """Return the constraints without the habits that the user's flags override."""

        def gives_way(pin: Pin) -> bool:
            fields = (pin.field, *pin.also_by)
            return pin.is_habit and any(map(said.has, fields))

        return replace(self, pins=tuple(pin for pin in self.pins if not gives_way(pin)))

    def allow(self, field: str, value: Any) -> bool:
        """Return True if a field may have a value."""
        return all(value in pin.values for pin in self.pins if pin.field == field)

    def among(self, field: str, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values that a field may have; the script's own if there are none."""
        found = tuple(value for value in values if self.allow(field, value))
        return found or next(pin.values[:1] for pin in self.pins if pin.field == field)

    def settled(self) -> dict[str, Pin]:
        """Return the pins with a single value, by field."""
        return {pin.field: pin for pin in self.pins if len(pin.values) == 1}


def constraints_of(capture: Capture, *, topology: Topology) -> Constraints:
    """Return the constraints of a script: what can't be applied without changing its results."""
    return Constraints(
        pins=(
            *_of_batches(capture, topology),
            *_of_checkpointing(capture),
            *_of_engine(capture),
            *_of_optimizer(capture),
            *_of_precision(capture),
            *_of_clipping(capture),
            *_of_model(capture),
            *_of_data(capture),
        )
    )


_PREFIX = "PREFIX_TUNING"
"""A type of adapter in peft."""


def micro_batch_of(capture: Capture, topology: Topology) -> int | None:
    """Return the samples per rank in one forward pass of the unchanged script; None if unknown."""
    size = capture.micro_batch_size
    if size is None or not capture.splits_batches:
        return size
    return max(1, size // topology.data_parallel_size)


def _of_batches(capture: Capture, topology: Topology) -> Iterator[Pin]:
    size, steps = micro_batch_of(capture, topology), capture.passes_per_step
    accumulates = capture.trainer_accumulates(topology.data_parallel_size)
    whole = _why_whole(capture) or ("" if accumulates else capture.whole_because)
    if size is None or whole:
        why, rule = whole, "batches-stay-whole"
        if not whole:
            why, rule = "the size of the script's batches is unknown", "batches-of-unknown-size"
        yield Pin(field="micro_batch_size", values=(size,), why=why, rule=rule)
        steps_of = None if size is None else steps
        yield Pin(field="gradient_accumulation_steps", values=(steps_of,), why=why, rule=rule)
    elif not accumulates:
        divisors = [number for number in range(size, 0, -1) if size % number == 0]
        why = f"the script's batches of {size} samples are split in equal parts inside the forward pass"
        rule = "batches-split-in-equal-parts"
        yield Pin(field="micro_batch_size", values=tuple(divisors), why=why, rule=rule)
        passes = tuple(steps * size // part for part in divisors)
        yield Pin(field="gradient_accumulation_steps", values=passes, why=why, rule=rule)


def _why_whole(capture: Capture) -> str:
    """Return why a batch can't be split; empty if it can."""
    if capture.model.mixes_samples:
        return f"{listed(capture.model.mixes_samples)} of the model compute over all samples of a batch"
    library, name = capture.trainer_class.partition(".")[0], capture.trainer_class.rpartition(".")[2]
    if _COMPARING in (library, capture.model.class_path.partition(".")[0]):
        return "the losses of sentence-transformers compare the samples of a batch with each other"
    handed_on = ("training_step",) if library == "trl" and name in _HANDING_ON else ()
    overridden = [
        override for override in capture.trainer_overrides if override in _LOOPS and override not in handed_on
    ]
    return f"{name} has its own {listed(overridden)}" if overridden else ""


def _of_checkpointing(capture: Capture) -> Iterator[Pin]:
    model, field = capture.model, "gradient_checkpointing"
    if model.checkpoints:
        yield Pin(field=field, values=(True,), why="the script enables it", is_habit=True)
    elif _PREFIX in model.adapters:
        why = "prefix tuning keeps its prefix in the cache, which gradient checkpointing drops"
        yield Pin(field=field, values=(False,), why=why, rule="prefix-tuning-without-checkpointing")
    elif not model.can_checkpoint:
        yield without_checkpointing(model.class_path.rpartition(".")[2])


def without_checkpointing(class_name: str) -> Pin:
    """Return the pin of a model whose class does not support gradient checkpointing."""
    why = f"{class_name} does not support gradient checkpointing"
    return Pin(field="gradient_checkpointing", values=(False,), why=why, rule="checkpointing-needs-support")


def _of_engine(capture: Capture) -> Iterator[Pin]:
    rule, why = _why_native(capture)
    habit = ""
    if capture.edits_gradients and not capture.made_by_engine:
        habit = f"the script edits gradients ({capture.edits_gradients}), which ZeRO moves in backward()"
    if why or habit:
        fields = ("engine", "zero_stage", "optimizer_offload", "param_offload")
        for field in fields:
            values: tuple[object, ...] = (getattr(Strategy(), field),)
            if field == "engine" and not capture.uses_local_sgd:  # FSDP2 leaves optimizers to the script
                values = (*values, Engine.FSDP2)
            yield Pin(
                field=field, values=values, why=why or habit, rule=rule, is_habit=not why, also_by=fields
            )
    elif capture.made_by_engine:
        sections = listed(capture.made_by_engine)
        why = f"the script's DeepSpeed configuration makes its {sections}, which no other engine reads"
        yield Pin(field="engine", values=(Engine.DEEPSPEED,), why=why, rule="deepspeed-makes-parts-of-script")


def _why_native(capture: Capture) -> tuple[str, str]:
    """Return the rule by which DeepSpeed can't train a script, and why; both empty if it can."""
    prepared = [optimizer for optimizer in capture.optimizers if optimizer.is_prepared]
    own = capture.optimizer
    if capture.uses_local_sgd:
        return "local-sgd-needs-pytorch", "accelerate's LocalSGD runs without DeepSpeed alone"
    if capture.num_models > 1:
        why = f"accelerate takes one model under DeepSpeed, and the script prepares {capture.num_models}"
        return "one-model-per-accelerator", why
    steps = "DeepSpeed's engine steps one optimizer, and the script"
    if len(prepared) > 1:
        return "one-optimizer-per-engine", f"{steps} prepares {len(prepared)}"
    if capture.optimizers and not prepared:
        why = "DeepSpeed's engine has to step the optimizer, and the script's does not go through prepare()"
        return "engine-needs-prepared-optimizer", why
    if len(capture.optimizers) > len(prepared):
        return "one-optimizer-per-engine", f"{steps} has another that it does not prepare"
    if num_foreign := _num_foreign(capture):
        why = "DeepSpeed's engine steps what the model trains, and the optimizer has "
        return "engine-steps-the-model-alone", f"{why}{num_foreign:,} elements beside it"
    if own is not None and own.is_element_wise is False:
        why = f"ZeRO joins and cuts tensors, and {own.class_path.rpartition('.')[2]} looks at whole ones"
        return "zero-needs-element-wise-optimizer", why
    return "", ""


def _num_foreign(capture: Capture) -> int:
    """Return the number of elements in the optimizer that are not the model's, such as those of a loss.

    An optimizer of all the model's parameters may contain frozen ones. Packed quantized weights have fewer
    elements in an optimizer than they represent.
    """
    facts = capture.model.facts
    own = capture.optimizer
    held = sum(group.num_parameters for group in own.groups) if own is not None else 0
    most = facts.num_parameters if capture.model.is_quantized else facts.num_trainable_parameters
    return 0 if held == facts.num_parameters else max(0, held - most)


def _of_optimizer(capture: Capture) -> Iterator[Pin]:
    own, field = capture.optimizer, "optimizer"
    dropped = _dropped(own)
    if dropped:
        rule = "optimizer-option-without-replacement"
        why = f"the script has {dropped}=True, which no replacement optimizer supports"
        yield Pin(field=field, values=(None,), why=why, rule=rule)
        why = f"the script has {dropped}=True, which DeepSpeed's CPU Adam ignores"
        yield Pin(field="optimizer_offload", values=(OffloadDevice.NONE,), why=why, rule=rule)
        return
    if own is None:
        why = "the script has several optimizers" if capture.optimizers else "no optimizer was seen"
        yield Pin(field=field, values=(None,), why=why, rule="replacement-needs-one-optimizer")
    elif optimizer_of_class(own.class_path) != REPLACEMENT_IDS[OptimizerName.ADAMW]:
        why = f"the script trains with {own.class_path.rpartition('.')[2]}"
        yield Pin(field=field, values=(None,), why=why, is_habit=True)


def _dropped(optimizer: CapturedOptimizer | None) -> str:
    """Return the first setting that a replacement optimizer would drop; empty if there is none."""
    groups = optimizer.groups if optimizer is not None else ()
    return next((name for name in NOT_TAKEN_OVER if any(group.settings.get(name) for group in groups)), "")


def _of_precision(capture: Capture) -> Iterator[Pin]:
    field = "precision"
    if capture.model.is_quantized:
        why = "the base is quantized: its layers compute in the format that they were made for"
        yield Pin(field=field, values=(capture.precision,), why=why, rule="quantized-base-sets-precision")
    elif capture.mixed_precision == "fp8":
        yield Pin(field=field, values=(None,), why="the script trains in fp8", is_habit=True)
    elif capture.precision is not None:
        is_fp32 = capture.precision is Precision.FP32
        why = f"the script {'says mixed_precision=no' if is_fp32 else 'trains in ' + capture.mixed_precision}"
        yield Pin(field=field, values=(capture.precision,), why=why, is_habit=True)


def _of_clipping(capture: Capture) -> Iterator[Pin]:
    if capture.route is Route.TRAINER and capture.max_grad_norm == 0:
        why = "the script's max_grad_norm is 0"
        yield Pin(field="gradient_clipping", values=(0.0,), why=why, is_habit=True)


def _of_model(capture: Capture) -> Iterator[Pin]:
    """Yield the pins of changes to the model."""
    model = capture.model
    name = model.class_path.rpartition(".")[2]
    rule, whole = _why_model_stays(capture)
    yield from (_unchanged(field, whole, rule) for field in _OF_ONE_MODEL if whole)
    if not whole and not model.is_transformers:
        why = f"only transformers' models can be quantized on loading, and {name} is not one"
        yield _unchanged("quantization", why, "quantization-needs-from-pretrained")
    elif not whole and not model.loads_weights:
        why = "from_pretrained() quantizes weights as it loads them; the script creates this model without it"
        yield _unchanged("quantization", why, "quantization-needs-from-pretrained")
    if not model.is_transformers:
        why = "the script's model has its own attention"
        yield _unchanged("attention", why, "attention-needs-transformers")
        why = f"Liger's kernels replace transformers' modules, and {name} has none"
        yield _unchanged("liger", why, "liger-needs-transformers")
    if not (model.is_transformers and model.can_checkpoint):
        why = f"{name} does not support gradient checkpointing in each block"
        yield _unchanged("checkpoint_every", why, "checkpointing-needs-support")
    if not model.can_checkpoint:
        why = f"{name} does not support gradient checkpointing"
        yield _unchanged("activation_offload", why, "checkpointing-needs-support")
    rule, why = _why_not_partitioned(capture)
    if why:
        stages = tuple(stage for stage in ZeroStage if stage is not ZeroStage.PARAMETERS)
        yield Pin(field="zero_stage", values=stages, why=why, rule=rule)
        why = f"it needs stage 3, and {why}"
        yield Pin(field="param_offload", values=(OffloadDevice.NONE,), why=why, rule=rule)


def _why_model_stays(capture: Capture) -> tuple[str, str]:
    """Return the rule by which parts of the model can't be frozen, adapted or quantized, and why."""
    model = capture.model
    if capture.num_models > 1:
        why = f"the script prepares {capture.num_models} models, and a flag names none of them"
        return "changes-need-one-model", why
    if model.adapters:
        return "script-has-adapters", f"the script has adapters of its own ({listed(model.adapters)})"
    if model.is_quantized:
        why = "the script quantizes its weights itself, and has no adapters beside them"
        return "script-has-adapters", why
    return "", ""


def _why_not_partitioned(capture: Capture) -> tuple[str, str]:
    """Return the rule by which stage 3 is impossible, and why; both empty if it is possible."""
    model = capture.model
    if model.is_quantized:
        return "quantized-script-below-zero3", "a quantized base at stage 3 was not measured on GPUs"
    if capture.averages:
        why = f"{capture.averages} averages the model's weights, which stage 3 partitions"
        return "averaged-weights-below-zero3", why
    if capture.edits_weights:
        why = f"the script works with weights by hand ({capture.edits_weights}), which stage 3 partitions"
        return "weights-by-hand-below-zero3", why
    if capture.unprepared_models and not capture.models_left_whole:
        names = listed(capture.unprepared_models)
        why = f"at stage 3 transformers partitions {names} on creation, and the script does not prepare"
        return "unprepared-models-below-zero3", f"{why} all of its models"
    return "", ""


def of_packed_checkpoint() -> tuple[Pin, ...]:
    """Return the pins of a named model whose checkpoint is quantized."""
    stages = tuple(stage for stage in ZeroStage if stage is not ZeroStage.PARAMETERS)
    rule, why = (
        "quantized-base-not-partitioned",
        "the checkpoint is quantized, and its layers are not partitioned",
    )
    engines = (Engine.NATIVE, Engine.DEEPSPEED)
    return (
        Pin(field="engine", values=engines, why=why, rule=rule),
        Pin(field="zero_stage", values=stages, why=why, rule=rule),
        Pin(field="param_offload", values=(OffloadDevice.NONE,), why=why, rule=rule),
        Pin(field="quantization", values=(None,), why="the checkpoint is quantized", rule=rule),
    )


def _of_data(capture: Capture) -> Iterator[Pin]:
    """Yield the pins of changes to the batches."""
    loader = capture.loader
    order = ""
    if loader is not None and loader.num_samples is None:
        order = "the script reads its samples as a stream, whose order can't be changed"
    elif loader is not None and loader.batch_size is None:
        order = f"the script makes its batches itself ({loader.sampler})"
    elif loader is not None and "Sequential" in loader.sampler:
        order = f"the script does not shuffle: it sets the order of its samples ({loader.sampler})"
    field, lengths = "group_by_length", "grouping-needs-lengths"
    if capture.lengths is None:
        yield _unchanged(field, "the script's samples have no token lengths", lengths)
    elif order:
        yield _unchanged(field, order, "grouping-needs-shuffled-samples")
    elif not _tells_lengths(capture):
        why = "the script's dataset has no lengths: no column input_ids or length, no field lengths"
        yield _unchanged(field, why, lengths)


def _tells_lengths(capture: Capture) -> bool:
    """Return True if the lengths of more samples than those of the captured batches are known."""
    known = capture.lengths
    return (
        known is None
        or known.is_whole
        or known.num_samples > sum(len(batch.lengths) for batch in capture.batches)
    )


def _unchanged(field: str, why: str, rule: str) -> Pin:
    return Pin(field=field, values=(UNCHANGED[field],), why=why, rule=rule)


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
