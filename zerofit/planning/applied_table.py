"""The table of what a plan changes in a script's settings, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.checking.constraints import constraints_of
from zerofit.core.optimizers.entry import Swap
from zerofit.core.optimizers.lookup import REPLACEMENTS, entry_of, optimizer_of_class
from zerofit.core.plan import Origin
from zerofit.core.strategy import Engine, OffloadDevice, Precision, StateDictType, show
from zerofit.core.text_table import table_lines, wrapped
from zerofit.planning.number_formats import format_changes
from zerofit.scripts.capture_summary import batch_words, class_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.capture import Capture
    from zerofit.core.plan import Plan
    from zerofit.planning.solve import Answer


_HEADER = ("", "script alone", "runs", "why")
_NONE = OffloadDevice.NONE


def applied_rows(plan: Plan) -> tuple[Row, ...]:
    """Return the script settings that a plan changes, and those that can't be changed.

    Without a capture, the script's values are shown as "its own".
    """
    capture = plan.capture
    return tuple(
        row
        for rows in (
            _batch(plan, capture),
            _engine(plan),
            _shards(plan),
            _offload(plan),
            _precision(plan, capture),
            _formats(plan, capture),
            _checkpointing(plan, capture),
            _optimizer(plan, capture),
            _clipping(plan, capture),
            changed_model_rows(plan, capture),
            _held(plan, capture),
        )
        for row in rows
    )


def changes_text(answer: Answer, *, width: int | None = None) -> str:
    """Return what changes in a script, as a table; empty if the answer says that it runs as it is.

    Args:
        answer: with a choice for a captured script.
        width: columns of the terminal; None for no limit.
    """
    own, rows = answer.as_it_is, applied_rows(answer.plan)
    if not rows and own is not None and own.strategy == answer.plan.strategy:
        return ""
    return applied_table(rows, width=width)


def applied_table(rows: tuple[Row, ...], *, width: int | None = None) -> str:
    """Return the rows as a table, with reasons below their rows if it is too wide; a line if nothing changes.

    Args:
        width: columns of the terminal; None for no limit.
    """
    if not rows:
        return "runs as the script says, without any change"
    cells = [_HEADER, *((row.what, row.script_says, row.runs, row.why) for row in rows)]
    lines = table_lines(cells)
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    header, *settings = table_lines([row[:-1] for row in cells])
    below = [
        line for setting, row in zip(settings, rows, strict=True) for line in (setting, f"    {row.why}")
    ]
    return "\n".join(wrapped((header, *below), width))


def _batch(plan: Plan, capture: Capture | None) -> Iterator[Row]:
    strategy, ranks = plan.strategy, plan.topology.data_parallel_size
    micro, steps = strategy.micro_batch_size, strategy.gradient_accumulation_steps
    said = None if capture is None else capture.global_batch_size(ranks)
    asked = plan.workload.global_batch_size
    if asked is not None and said is not None and asked != said:
        why = f"--global-batch-size {asked} says so"
        yield Row(what="global batch", script_says=str(said), runs=str(asked), why=why)
    if micro is None and steps is None:
        return
    by_hand = capture.accumulates_by_hand if capture is not None else None
    own, runs = OWN, _batch_words(micro, steps and steps // (by_hand or 1), by_hand)
    if capture is not None and capture.micro_batch_size is not None:
        own = batch_words(capture)
        own += " of all ranks" if capture.splits_batches else ""
    if runs == own:
        return
    why = why_of(plan, "micro_batch_size", "gradient_accumulation_steps")
    if said is not None and said == asked:
        why += f"; global batch {said} as before"
    elif capture is None and micro is None:
        why += f"; a step is then {steps} of its own batches on each rank"
    yield Row(what="batch on each rank", script_says=own, runs=runs, why=why)


def _batch_words(micro: int | None, steps: int | None, by_hand: int | None) -> str:
    """Return micro-batch x accumulation, or the one that is known."""
    if micro is None:
        return f"accumulation of {steps}"
    words = f"pieces of {micro}" if steps is None else f"{micro} x {steps}"
    return f"{words}, stepped every {by_hand}" if by_hand else words


def _engine(plan: Plan) -> Iterator[Row]:
    strategy = plan.strategy
    own = plan.capture.engine if plan.capture is not None else ""
    says, runs = own or _plain(plan), _plain(plan)
    if strategy.engine is Engine.DEEPSPEED:
        runs = f"DeepSpeed ZeRO-{strategy.zero_stage.value}"
    elif strategy.engine is Engine.FSDP2:
        runs = "FSDP2"
    if strategy.engine is not Engine.NATIVE or (own and says != runs):
        yield Row(what="engine", script_says=says, runs=runs, why=why_of(plan, "zero_stage", "engine"))


def _plain(plan: Plan) -> str:
    """Return how a script runs without an engine."""
    return "DDP" if plan.topology.world_size > 1 else "plain PyTorch"


def _shards(plan: Plan) -> Iterator[Row]:
    """Yield how FSDP2 shards and saves, where it is not by its defaults."""
    if plan.strategy.engine is not Engine.FSDP2:
        return
    if not plan.strategy.reshard_after_forward:
        why = why_of(plan, "reshard_after_forward")
        yield Row(what="gathered weights", script_says=OWN, runs="kept until the backward pass", why=why)
    if (copies := plan.topology.dp_replicate_size) > 1:
        runs = f"{copies}, each over {plan.topology.dp_shard_size} ranks"
        yield Row(what="copies of weights", script_says=OWN, runs=runs, why=why_of(plan, "dp_replicate_size"))
    if plan.strategy.state_dict_type is StateDictType.FULL:
        why = why_of(plan, "state_dict_type")
        yield Row(what="checkpoints", script_says=OWN, runs="whole weights, by rank 0", why=why)


def _offload(plan: Plan) -> Iterator[Row]:
    devices = {"optimizer_offload": "optimizer states", "param_offload": "parameters"}
    here = "with the rank" if plan.topology.on_cpu else "on the GPU"
    for field, what in devices.items():
        device = getattr(plan.strategy, field)
        if device is not _NONE:
            place = "in host memory" if device is OffloadDevice.CPU else f"on NVMe, {plan.strategy.nvme_path}"
            yield Row(what=what, script_says=here, runs=place, why=why_of(plan, field))


def _precision(plan: Plan, capture: Capture | None) -> Iterator[Row]:
    precision = plan.strategy.precision
    own = capture.precision if capture is not None else None
    if precision is None or (plan.is_default("precision") and own is not None):
        return
    if capture is not None and precision is (own or Precision.FP32):
        return
    says = OWN if capture is None else own.value if own else "none, weights in " + capture.model.weight_dtype
    runs = precision.value
    if capture is None and plan.is_default("precision"):
        runs += ", where it names none"
    yield Row(what="precision", script_says=says, runs=runs, why=why_of(plan, "precision"))


def _formats(plan: Plan, capture: Capture | None) -> Iterator[Row]:
    """Yield the formats of weights, gradients and states that another engine changes."""
    for change in format_changes(capture, plan.strategy) if capture is not None and plan.trains else ():
        yield Row(what=change.what, script_says=change.before, runs=change.after, why=change.why)


def _checkpointing(plan: Plan, capture: Capture | None) -> Iterator[Row]:
    wanted, every = plan.strategy.gradient_checkpointing, plan.strategy.checkpoint_every
    offloads = plan.strategy.activation_offload
    is_own = capture is not None and wanted == capture.model.checkpoints and every == 1 and not offloads
    if wanted is None or is_own:
        return
    runs = _switch(wanted) if every == 1 else f"of 1 block in {every}"
    yield Row(
        what="gradient checkpointing",
        script_says=OWN if capture is None else _switch(capture.model.checkpoints),
        runs=f"{runs}, inputs of blocks in host memory" if offloads else runs,
        why=why_of(plan, "gradient_checkpointing"),
    )


def _switch(is_on: bool) -> str:
    return "on" if is_on else "off"


def _optimizer(plan: Plan, capture: Capture | None) -> Iterator[Row]:
    strategy = plan.strategy
    made = capture.optimizer if capture is not None else None
    own = OWN if made is None else class_name(made.class_path)
    if strategy.optimizer is not None:
        is_offloaded = strategy.optimizer_offload is not _NONE
        runs = "DeepSpeed's CPU Adam" if is_offloaded else REPLACEMENTS[strategy.optimizer].label
        yield Row(what="optimizer", script_says=own, runs=runs, why=why_of(plan, "optimizer"))
    elif strategy.optimizer_offload is not _NONE and made is not None and _is_alike_on_cpu(made.class_path):
        why = "states in host memory are stepped there; the same mathematics"
        yield Row(what="optimizer", script_says=own, runs="DeepSpeed's CPU Adam", why=why)


def _is_alike_on_cpu(class_path: str) -> bool:
    """Return True if DeepSpeed's CPU Adam, by which accelerate replaces an optimizer, computes the same."""
    entry = entry_of(optimizer_of_class(class_path))
    return entry is not None and entry.swap is Swap.SAME


def _clipping(plan: Plan, capture: Capture | None) -> Iterator[Row]:
    norm = plan.strategy.gradient_clipping
    own = capture.max_grad_norm if capture is not None else None
    if norm is None or norm == own:
        return
    says = OWN if own is None else f"norm {own:g}" if own else "off"
    runs = f"norm {norm:g}" if norm else "off"
    yield Row(what="gradient clipping", script_says=says, runs=runs, why=why_of(plan, "gradient_clipping"))


def _held(plan: Plan, capture: Capture | None) -> Iterator[Row]:
    """Yield the settings that can't safely be changed."""
    if capture is None:
        return
    batch = "its own, size unknown"
    if capture.micro_batch_size is not None:
        batch = batch_words(capture)
    names = [class_name(optimizer.class_path) for optimizer in capture.optimizers]
    words = {
        "micro_batch_size": ("batch on each rank", batch),
        "engine": ("engine", _plain(plan)),
        "gradient_checkpointing": ("gradient checkpointing", _switch(capture.model.checkpoints)),
        "optimizer": ("optimizer", ", ".join(names) or OWN),
    }
    for pin in constraints_of(capture, topology=plan.topology).pins:
        is_open = pin.is_habit or len(pin.values) > 1 or pin.field not in words
        is_open |= pin.field == "micro_batch_size" and capture.micro_batch_size == 1
        is_open |= pin.values[0] is Engine.DEEPSPEED  # has a row of its own
        if is_open or getattr(plan.strategy, pin.field) not in (None, pin.values[0]):
            continue
        what, own = words[pin.field]
        yield Row(what=what, script_says=own, runs=f"{own}, kept", why=pin.why)


OWN = "its own"
"""The value of an unknown setting of the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting."""

    what: str
    """Its name, as displayed."""
    script_says: str
    """The script's value, or the default."""
    runs: str
    why: str


def why_of(plan: Plan, *fields: str) -> str:
    """Return the reason of the first of these fields that has one, preferring reasons by flag."""
    found = [reason for field in fields for reason in plan.reasons if reason.field == field]
    by_flag = [reason for reason in found if reason.origin is Origin.FLAG and reason.why.startswith("--")]
    return next((reason.why for reason in (*by_flag, *found)), "the plan says so")


def changed_model_rows(plan: Plan, capture: Capture | None) -> Iterator[Row]:
    """Yield a row for each change to the model."""
    yield from _what_trains(plan, capture)
    yield from _code(plan, capture)
    if plan.strategy.group_by_length:
        why = why_of(plan, "group_by_length")
        own = OWN if capture is None else "in the order of its sampler"
        yield Row(what="batches", script_says=own, runs="of samples of like length", why=why)


def _what_trains(plan: Plan, capture: Capture | None) -> Iterator[Row]:
    strategy = plan.strategy
    own = OWN
    if capture is not None:
        own = _share(capture.model.facts.num_trainable_parameters, capture.model.facts.num_parameters)
    runs = []
    if strategy.freeze:
        runs.append(f"without {show(strategy.freeze)}")
    if strategy.lora is not None:
        beside = f", none in {show(strategy.freeze)}" if strategy.freeze else ""
        runs = [f"LoRA of {show(strategy.lora)}{beside}"]
    if runs and plan.estimate is not None and plan.estimate.num_trained:
        runs.append(f"{plan.estimate.num_trained:,} parameters")
    if runs:
        why = why_of(plan, "lora", "freeze")
        yield Row(what="what trains", script_says=own, runs="; ".join(runs), why=why)
    if strategy.quantization is not None:
        says = OWN if capture is None else capture.model.weight_dtype
        stored = f", stored in {strategy.quant_storage}" if strategy.quant_storage is not None else ""
        runs_in = f"{strategy.quantization} in its linear layers{stored}"
        yield Row(what="frozen weights", script_says=says, runs=runs_in, why=why_of(plan, "quantization"))


def _share(trained: int, total: int) -> str:
    return "all parameters" if trained == total else f"{trained:,} of {total:,} parameters"


def _code(plan: Plan, capture: Capture | None) -> Iterator[Row]:
    strategy = plan.strategy
    own = OWN if capture is None else capture.model.attention
    if strategy.attention is not None and strategy.attention != own:
        why = why_of(plan, "attention")
        yield Row(what="attention", script_says=own or OWN, runs=strategy.attention, why=why)
    if strategy.liger:
        runs = "Liger's kernels"
        yield Row(what="modules", script_says="transformers' own", runs=runs, why=why_of(plan, "liger"))
    if strategy.tf32 is not None:
        runs = "tf32 on tensor cores" if strategy.tf32 else "full precision"
        if plan.topology.on_cpu:
            runs = "full precision, as ever on the CPU"
        yield Row(what="fp32 products", script_says=OWN, runs=runs, why=why_of(plan, "tf32"))
    if strategy.compile:
        yield Row(what="torch.compile", script_says="off", runs="on", why=why_of(plan, "compile"))
