"""The table of `zerofit generate`: one row per layout, with memory per GPU and host, and why it lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.facts import parameters
from zerofit.core.strategy import ZeroStage
from zerofit.core.text_table import table_lines
from zerofit.core.units import format_bytes
from zerofit.generation.generation_job import Gather
from zerofit.planning.inference.problem import duration, layout_words
from zerofit.planning.plan_labels import gpus_words, memory_label, terms_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.estimates import PhaseMemory
    from zerofit.planning.inference.problem import InferenceCandidate, InferencePlan


def inference_table(plan: InferencePlan) -> str:
    """Return the plan that `zerofit generate` prints."""
    return "\n".join([*_head(plan), "", *_rows(plan), "", *_foot(plan)])


def _head(plan: InferencePlan) -> Iterator[str]:
    model, workload, machine = plan.problem.model, plan.problem.workload, plan.problem.machine
    kind = model.architecture or model.model_type
    many = "s" * (workload.num_prompts != 1)
    yield f"{model.name}: {kind}, {parameters(model)} parameters, {plan.dtype}"
    lengths = f"at most {workload.longest_prompt} tokens, at most {workload.max_new_tokens} new ones"
    yield f"{workload.num_prompts} prompt{many} of {lengths}{_sequences(plan)}"
    host = f"{format_bytes(plan.problem.host_bytes)} of host memory"
    if plan.topology.on_cpu:
        yield f"on the CPU: {host}"
        return
    nodes = f"{plan.problem.request.num_nodes} nodes of " if (plan.problem.request.num_nodes or 1) > 1 else ""
    there = min(gpu.usable_bytes for gpu in machine.gpus)
    to_use = f"{format_bytes(plan.problem.device_bytes)} of {format_bytes(there)} to be used on each"
    yield f"on {nodes}{gpus_words(machine)}: {to_use}, {host}"


def _sequences(plan: InferencePlan) -> str:
    workload = plan.problem.workload
    if workload.num_beams > 1:
        return f", {workload.num_beams} beams"
    return f", {workload.num_return_sequences} completions each" if workload.num_return_sequences > 1 else ""


def _rows(plan: InferencePlan) -> list[str]:
    header = ["", "layout", "batch", "GPU GiB", "host GiB", "verdict"]
    verdict = plan.chosen.shortage or ("fits, closely" if plan.is_close else "fits")
    rows = [header, [">" if plan.fits else "?", *_cells(plan.chosen), verdict]]
    rows += [["", *_cells(other), why] for other, why in plan.others]
    if plan.topology.on_cpu:
        rows = [[*row[:3], *row[4:]] for row in rows]
    return table_lines(rows)


def _cells(candidate: InferenceCandidate) -> list[str]:
    device = memory_label(candidate.device) if candidate.device is not None else ""
    words = layout_words(candidate.strategy, candidate.topology)
    return [words, str(candidate.batch_size), device, memory_label(candidate.host)]


def _foot(plan: InferencePlan) -> Iterator[str]:
    for field, name, value in (
        ("zero_stage", "layout", ""),
        ("world_size", "ranks", f" {plan.topology.world_size}"),
        ("micro_batch_size", "batch", f" {plan.batch_size}"),
        ("precision", "dtype", f" {plan.dtype}"),
    ):
        reason = next(one for one in plan.reasons if one.field == field)
        yield f"{name}{value}: {reason.why}"
    if plan.problem.workload.gather is Gather.ALWAYS and plan.strategy.zero_stage is ZeroStage.NOTHING:
        yield "--gather always: nothing to gather, as each rank holds the whole model"
    if plan.fits and plan.chosen.seconds is not None:
        what = "to read and move weights, at the peaks of memory and links: computed, not measured"
        yield f"time: about {duration(plan.chosen.seconds)} {what}"
    if plan.chosen.device is not None:
        yield _largest("GPU", plan.chosen.device.peak)
    yield _largest("host", plan.chosen.host.peak)
    if not plan.fits and plan.suggestions:
        yield ""
        yield "Nothing fits. It would with one of these:"
        yield from (f"  {words}" for words in plan.suggestions)
    elif not plan.fits:
        yield ""
        yield "Nothing fits, and no single change that was tried helps."


def _largest(where: str, peak: PhaseMemory) -> str:
    """Return the large terms of a phase: "GPU, most in decode: weights 15.0 GiB"."""
    return f"{where}, most in {peak.phase.value}: {terms_words(peak)}"
