"""Rows of what a plan changes in a script's model and batches: what trains, in which format, by what code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.choose import show
from zerofit.render.applied_row import OWN, Row, why_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.capture import Capture
    from zerofit.plan import Plan


def changed_model_rows(plan: Plan, capture: Capture | None) -> Iterator[Row]:
    """Yield one row for each change."""
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
        runs_in = f"{strategy.quantization} in its linear layers"
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
