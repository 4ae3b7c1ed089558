"""A plan as a table: one row for the choice and one for the best of each other placement."""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder
from zerofit.core.facts import parameters
from zerofit.core.strategy import Buckets
from zerofit.core.text_table import table_lines, wrapped
from zerofit.core.units import format_bytes
from zerofit.planning.options import MachineFlags
from zerofit.planning.plan_labels import (
    batch,
    fit_words,
    gib,
    gpus_words,
    group_sizes,
    kind_label,
    label,
    memory_label,
    range_label,
    rate_name,
    step_time_label,
    terms_words,
    throughput,
    workload_words,
)
from zerofit.planning.plan_reasons import why_it_loses, why_untraced
from zerofit.planning.search import TIME_TIE_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zerofit.core.estimates import MemoryEstimate, PhaseMemory
    from zerofit.core.strategy import Strategy
    from zerofit.planning.problem import Problem
    from zerofit.planning.run_spec import RunSpec
    from zerofit.planning.search import EstimatedStrategy
    from zerofit.planning.solve import Answer
    from zerofit.planning.sources.typed_line import TypedLine
    from zerofit.planning.suggestions import Suggestion

_BAR = 20
_BAR_NAME = "GPU memory"
_AT_LEAST = "too large: weights, gradients, states and context of its smallest variant"
COMMAND = "    "
"""Indentation of a command to paste."""
_ONLY_PLANNING = (
    "compare_layouts",
    "why",
    "wide",
    "as_json",
    "output",
    "force",
    "plot",
    "html",
    "num_nodes",
    "is_fast",
)
"""Parameters that `zerofit launch` does not need for the same plan, beside those of another machine."""
_ONLY_SHOWING = ("dry_run", "verbose", "quiet")
"""Parameters of `zerofit launch` that change nothing in a run."""
_WIDE = 160
"""Terminal columns from which on verdicts and strategies are written in full."""
_LESS_IMPORTANT = (3, 7, 5, 6, 2)
"""Columns to leave out first in a narrow terminal: the bar, rate, host, step, batch."""
_SHORT = (
    ("optimizer on cpu, weights on cpu", "all on cpu"),
    ("optimizer on nvme, weights on nvme", "all on nvme"),
    ("optimizer on", "states on"),
    ("checkpointing", "ckpt"),
    ("small buckets", "buckets"),
)
"""Abbreviations of strategies in a narrow table."""
_TOO_LARGE = "too large"
_GROUPS = {
    "tp": "{} GPUs share the layers (tensor parallelism)",
    "sp": "{} GPUs share the tokens of a sample (sequence parallelism)",
    "pp": "{} GPUs share the blocks (pipeline parallelism)",
}
_HEADER = ("", "strategy", "batch", _BAR_NAME, "GiB", "host GiB", "step", "", "verdict")
"""The empty one is the unit of the rate, which depends on the model."""


def plan_table(answer: Answer, *, width: int | None = None) -> str:
    """Return what `zerofit plan` prints.

    Args:
        width: columns of the terminal; None for no limit.
    """
    rows = _cells(answer, is_short=is_narrow(width))
    table = table_lines(rows, width=width, leaves_out=_LESS_IMPORTANT)
    last = _peak(answer) if answer.fits else nothing_fits_lines(answer)
    return "\n".join(
        [
            *wrapped(head_lines(answer), width),
            "",
            *table,
            "",
            *wrapped(legend_lines(answer, columns=table[0]), width),
            "",
            *wrapped(last, width, whole=COMMAND),
        ]
    )


def machine_words(answer: Answer) -> str:
    """Return the GPUs: "8 x NVIDIA A100-SXM4-80GB", "2 nodes of 8 x ..."."""
    topology = answer.problem.topology
    gpus = gpus_words(answer.problem.machine)
    return f"{topology.num_nodes} nodes of {gpus}" if topology.num_nodes > 1 else gpus


def head_lines(answer: Answer) -> Iterator[str]:
    problem = answer.problem
    model = problem.model
    kind = model.architecture or model.model_type
    words = f"{parameters(model)} parameters"
    words = words if kind == model.name else f"{kind}, {words}"
    yield f"{model.name} ({words}), {workload_words(problem)}"
    per_gpu = f"{format_bytes(problem.device_bytes)} of {format_bytes(problem.card_bytes)} to be used"
    host = f"{format_bytes(problem.host_bytes)} of host memory"
    described = problem.spec.described
    if described.gpus is not None and described.host_ram is None:
        host += ", which is assumed: set --host-ram"
    yield f"on {machine_words(answer)}: {per_gpu} on each, {host}"
    if answer.screen is not None:
        yield "a screen by closed forms: a trace of the model says more"
    elif answer.is_fast:
        yield "estimated by closed forms, not by a trace of the model; the numbers are rougher"


def answer_html(answer: Answer) -> str:
    """Return the same as HTML, for notebooks."""

    last = _peak(answer) if answer.fits else nothing_fits_lines(answer)
    return table_as_html(head_lines(answer), _cells(answer, is_short=False), (legend_lines(answer), last))


def table_as_html(head: Iterable[str], cells: Sequence[Sequence[str]], below: Iterable[Iterable[str]]) -> str:
    """Return paragraphs of lines above and below a table, whose first row is its header, as HTML."""

    def paragraph(lines: Iterable[str]) -> str:
        return f"<p>{'<br>'.join(html.escape(line) for line in lines)}</p>"

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    header, *rows = cells
    table = "".join((row(header, "th"), *(row(row_cells, "td") for row_cells in rows)))
    return f"{paragraph(head)}<table>{table}</table>{''.join(map(paragraph, below))}"


def short_label(words: str) -> str:
    """Return a strategy's label for a narrow table."""
    for long, short in _SHORT:
        words = words.replace(long, short)
    return words


def is_narrow(width: int | None) -> bool:
    """Return True if verdicts and strategies must be abbreviated."""
    return width is not None and width < _WIDE


def _cells(answer: Answer, *, is_short: bool) -> list[list[str]]:
    """Return the table's header and rows, abbreviated if is_short."""
    found = answer.found
    header = [*_HEADER[:-2], rate_name(answer.head.estimate, answer.problem.model), _HEADER[-1]]
    rows = [header, _row(answer, answer.head, ">" if answer.fits else "?", is_short=is_short)]
    rows += [_row(answer, judged, "", is_short=is_short) for judged in found.others]
    problem = answer.problem
    for out in found.ruled_out:
        least = f"at least {gib(out.least_bytes)}"
        name = kind_label(out.strategy, problem.topology)
        rows.append(["", name, "-", ">" * _BAR, least, "-", "-", "-", _TOO_LARGE if is_short else _AT_LEAST])
    for row in rows if is_short else ():
        row[1] = short_label(row[1])
    return rows


def short_verdict(answer: Answer, judged: EstimatedStrategy) -> str:
    """Return briefly if a strategy fits, and its time relative to the choice."""
    if not judged.fits:
        on_gpu = judged.estimate.device.peak_bytes > answer.problem.device_bytes
        return _TOO_LARGE if on_gpu else f"needs {gib(judged.estimate.host.peak_bytes)} GiB of host"
    verdict, chosen = fit_words(judged.estimate, answer.problem), answer.found.chosen
    ratio = None if chosen is None else _speedup(chosen, judged)
    if judged is answer.head or ratio is None:
        return verdict
    if ratio >= 2:
        return f"{verdict}, {ratio:.1f}x time"
    if 0.95 < ratio < 1.05:
        return f"{verdict}, as fast"
    return f"{verdict}, {ratio - 1:.0%} slower" if ratio > 1 else f"{verdict}, {1 - ratio:.0%} faster"


def _row(answer: Answer, judged: EstimatedStrategy, mark: str, *, is_short: bool) -> list[str]:
    estimate, problem = judged.estimate, answer.problem
    if is_short:
        verdict = short_verdict(answer, judged)
    elif judged.fits:
        verdict = fit_words(estimate, problem)
        if judged is not answer.head:
            verdict += f", {why_it_loses(judged, answer.found.chosen, problem)}"
    else:
        verdict = judged.shortage
    return [
        mark,
        label(judged.strategy, problem.topology, beside=answer.head.strategy),
        batch(judged.strategy),
        bar(estimate.device.peak, limit_bytes=problem.device_bytes, width=_BAR),
        memory_label(estimate.device),
        memory_label(estimate.host),
        step_time_label(estimate.step_time),
        throughput(judged, problem.topology),
        verdict,
    ]


def legend_lines(answer: Answer, *, columns: str = " ".join(_HEADER)) -> Iterator[str]:
    letters = ", ".join(f"{group.letter} {group.name}" for group in GROUPS)
    ranks = answer.problem.topology.world_size
    where = f"each of {ranks} GPUs" if ranks > 1 else "the GPU"
    for short, size in group_sizes(answer.problem.topology):
        yield f"{short} {size}:{' ' * (5 - len(str(size)) - len(short))}{_GROUPS[short].format(size)}"
    if (size := answer.problem.topology.sample_group_size) > 1:
        where = f"each group of {size} GPUs"
    if "batch" in columns:
        yield f"batch: micro-batch x accumulation, on {where}"
    if _BAR_NAME in columns:
        yield f"bar:   {letters}; its end is {format_bytes(answer.problem.device_bytes)}"
    if answer.screen is None:
        yield "±:     a measurement is expected within it; where it reaches beyond GPU or host: fits closely"


def _peak(answer: Answer) -> Iterator[str]:
    device = answer.head.estimate.device
    peak = device.peak
    allocated = gib(peak.held_by(Holder.TENSORS))
    yield f"most in {peak.phase.value}: {terms_words(peak)}; tensors alone {allocated} GiB"
    yield f"±: {device.uncertainty_source}"
    yield from _fsdp2(answer)


def _fsdp2(answer: Answer) -> Iterator[str]:
    """Yield how FSDP2 compares, and the flag that plans it, where it was left out though it may fit."""
    untraced, problem = answer.found.untraced, answer.problem
    if untraced is not None and untraced.least_bytes <= problem.device_bytes:
        yield f"FSDP2: {why_untraced(untraced, answer.found, problem)}"


def nothing_fits_lines(answer: Answer) -> Iterator[str]:
    judged = answer.head
    problem, estimate = answer.problem, judged.estimate
    yield f"Nothing fits. Nearest is {label(judged.strategy, answer.problem.topology)}: {judged.shortage}."
    if estimate.device.peak_bytes > problem.device_bytes:
        yield _largest("GPU", estimate.device)
    if estimate.host.peak_bytes > problem.host_bytes:
        yield _largest("host", estimate.host)
    if not answer.suggestions:
        yield "No single change that was tried makes it fit."
        return
    yield "It would fit with one of these:"
    for suggestion in answer.suggestions:
        estimate = suggestion.best.estimate
        chosen = suggestion.best.strategy
        before = replace(chosen, precision=problem.own_precision) if problem.own_precision else None
        strategy = label(chosen, problem.topology, beside=before)
        if batch(chosen) != batch(judged.strategy):
            strategy += f", batch {batch(chosen)}"
        line = f"  {suggestion.change}: {strategy}, {_needs(estimate.device, answer)} GiB on each GPU"
        if suggestion.is_close:
            line += ", closely" if answer.screen is None else ", may fit"
        yield f"{line}; {suggestion.results}"
        if command := command_with(suggestion, problem.spec):
            yield f"{COMMAND}{command}"


def _needs(device: MemoryEstimate, answer: Answer) -> str:
    return memory_label(device) if answer.screen is None else range_label(device)


def command_with(suggestion: Suggestion, spec: RunSpec) -> str:
    """Return the command to type for a suggestion: a launch if there is a script; empty if there is none."""
    changes = suggestion.changes
    if not spec.typed or not changes:
        return ""
    if not any(change.name in MachineFlags.__dataclass_fields__ for change in changes):
        return str(launch_line(spec).changed(changes))
    return str(spec.typed.changed(changes)) if spec.described.gpus is not None else ""


def launch_line(spec: RunSpec) -> TypedLine:
    """Return the line that trains what a line plans, or shows without training; another verb's as it is."""
    typed = spec.typed
    if typed.verb[1:] == ("launch",):
        machine = () if spec.on_cpu else MachineFlags.__dataclass_fields__  # a rehearsal plans for others
        return typed.without({*_ONLY_SHOWING, *machine})
    if spec.target is None or typed.verb[1:] != ("plan",):
        return typed
    left_out = {*_ONLY_PLANNING, *MachineFlags.__dataclass_fields__}
    return replace(typed.without(left_out), verb=("zerofit", "launch"))


def as_it_is_lines(answer: Answer, *, has_terms: bool = True) -> list[str]:
    """Return the verdicts on the unchanged script and on its configuration files, and how the plan differs.

    Empty without a script and without files.

    Args:
        has_terms: True to list the terms of the script's peak memory.
    """
    own, files, chosen = answer.as_it_is, answer.as_files_say, answer.found.chosen
    lines = []
    if files is not None:  # what the line means comes first
        lines.append(_files_line(files, answer))
    if own is not None:
        said = as_it_is_words(own, answer.problem, has_files=files is not None)
        if chosen is not None and chosen.strategy == own.strategy:
            said += "; nothing is changed" if files is None else "; this is what runs"
        elif chosen is not None and own.fits:
            said += f"; {_changed(chosen, own, answer.problem)}"
        lines += [said, *(_terms_lines(own.estimate.device) if has_terms else ())]
    if chosen is not None and lines and (own is None or chosen.strategy != own.strategy):
        lines.append(_runs_with(chosen, answer))
    if lines and answer.in_16_bits is not None and chosen is not None:
        lines += _hint(answer.in_16_bits, chosen)
    return lines


def as_it_is_words(own: EstimatedStrategy, problem: Problem, *, has_files: bool = False) -> str:
    """Return the verdict on the unchanged script, which configuration files are no part of."""
    return f"{as_it_is_name(has_files=has_files)}: {_verdict(own, problem)}"


def as_it_is_name(*, has_files: bool) -> str:
    """Return what the unchanged script is called: alone, or beside the meaning of its files."""
    return "your script without these files" if has_files else "your script as it is"


def _files_line(judged: EstimatedStrategy, answer: Answer) -> str:
    """Return the verdict on the strategy of the configuration files, and why another one is chosen."""
    problem, chosen, files = answer.problem, answer.found.chosen, answer.problem.spec.files
    name = "" if files is None else f" ({files.name})"
    flags = dict.fromkeys(
        problem.said.where(field) for field in problem.said.beaten if problem.said.has(field)
    )
    sayers = f"as your files{name} and {', '.join(flags)} say" if flags else f"as your files say{name}"
    words = label(replace(judged.strategy, buckets=Buckets()), problem.topology)
    said = f"{sayers}: {words}, {_verdict(judged, problem)}"
    if chosen is None:
        return said
    if replace(chosen.strategy, buckets=judged.strategy.buckets) == judged.strategy:
        return f"{said}; this is what runs"
    return f"{said}; not chosen: {why_it_loses(judged, chosen, problem)}" if judged.fits else said


def _verdict(judged: EstimatedStrategy, problem: Problem) -> str:
    """Return the memory of a strategy, whether it fits, and the time of its step."""
    device = judged.estimate.device
    where = " on each GPU" if problem.topology.world_size > 1 else ""
    said = f"{_in_gib(device)} of {format_bytes(problem.card_bytes)}{where}, "
    if device.peak_bytes > problem.card_bytes:
        return said + "does not fit"
    if not judged.fits:
        free = format_bytes(problem.card_bytes - problem.device_bytes)
        is_device = device.peak_bytes > problem.device_bytes
        return said + (f"does not fit with {free} kept free" if is_device else judged.shortage)
    said += fit_words(judged.estimate, problem)
    time = judged.estimate.step_time
    return said if time is None else f"{said}, {step_time_label(time)} a step"


def decision_lines(answer: Answer) -> list[str]:
    """Return the answer in a few lines, for a run that starts at once."""
    chosen = answer.found.chosen
    if chosen is None or answer.as_it_is is not None or answer.as_files_say is not None:
        lines = as_it_is_lines(answer, has_terms=False)
    else:
        lines = [_runs_with(chosen, answer)]
    if answer.problem.spec.options.is_fast:
        lines.append("chosen by closed forms, and a trace may choose another: leave out --fast for that")
    return lines


def _runs_with(chosen: EstimatedStrategy, answer: Answer) -> str:
    own = None if answer.as_it_is is None else answer.as_it_is.strategy
    strategy = label(chosen.strategy, answer.problem.topology, beside=own)
    words = f"runs with {strategy}, batch {batch(chosen.strategy)}: {_in_gib(chosen.estimate.device)}"
    time = chosen.estimate.step_time
    return words if time is None else f"{words}, {step_time_label(time)} a step"


def _in_gib(estimate: MemoryEstimate) -> str:
    return f"{format_bytes(estimate.peak_bytes)} ±{estimate.uncertainty:.0%}"


def _changed(chosen: EstimatedStrategy, own: EstimatedStrategy, problem: Problem) -> str:
    """Return why a script that fits unchanged is changed: flags, speed, or safety."""
    flags = [
        problem.said.where(name)
        for name, value in problem.said.strategy.items()
        if value != getattr(own.strategy, name)
    ]
    is_other_batch = _samples(chosen.strategy) != _samples(own.strategy)
    if is_other_batch and problem.said.has("global_batch_size"):
        flags.append("--global-batch-size")
    ratio = None if is_other_batch else _speedup(chosen, own)
    speed = ""
    if ratio is not None and not 1 / 1.05 < ratio < 1.05:
        speed = f"about {ratio:.1f} x faster" if ratio > 1 else f"about {1 / ratio:.1f} x slower"
    if flags:
        listed = " and ".join(filter(None, (", ".join(flags[:-1]), flags[-1])))
        return f"changed as {listed} {'say' if len(flags) > 1 else 'says'}" + (f": {speed}" if speed else "")
    is_safer = problem.is_close(own.estimate) and not problem.is_close(chosen.estimate)
    return "changed to fit surely" if is_safer else f"changed: {speed}" if speed else "changed"


def _samples(strategy: Strategy) -> int:
    return (strategy.micro_batch_size or 1) * (strategy.gradient_accumulation_steps or 1)


def _speedup(other: EstimatedStrategy, own: EstimatedStrategy) -> float | None:
    time, own_time = other.estimate.step_time, own.estimate.step_time
    return own_time.seconds / time.seconds if time is not None and own_time is not None else None


def _hint(other: EstimatedStrategy, chosen: EstimatedStrategy) -> Iterator[str]:
    ratio, precision = _speedup(other, chosen), other.strategy.precision
    if ratio is not None and precision is not None and ratio > 1 + TIME_TIE_SHARE:
        yield f"hint: --mixed-precision {precision.value} is about {ratio:.1f} x faster and rounds more;"
        yield "      --prefer-speed takes it"


def _terms_lines(device: MemoryEstimate) -> Iterator[str]:
    """Yield the terms of a peak, the largest first, in lines of 80 columns."""
    text = f"in {device.peak.phase.value}: {terms_words(device.peak)}"
    yield from textwrap.wrap(text, 80, initial_indent="  ", subsequent_indent="    ")


def _largest(where: str, estimate: MemoryEstimate) -> str:
    peak = estimate.peak
    term = max(peak.terms, key=lambda term: term.num_bytes)
    return f"Largest on the {where}, in {peak.phase.value}: {term.name}, {format_bytes(term.num_bytes)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Terms that share a letter in the bar."""

    letter: str
    name: str
    terms: frozenset[str]


GROUPS = tuple(
    Group(letter=letter, name=name, terms=frozenset(terms))
    for letter, name, terms in (
        ("W", "weights", ("weights", "16-bit weight copies", "buffers")),
        ("O", "optimizer", ("optimizer states", "master weights", "optimizer temporaries")),
        ("G", "gradients", ("gradients", "gradient bucket", "gradient copy", "gradient partition")),
        (
            "A",
            "activations",
            (
                "activations",
                "recomputed activations",
                "activation gradients",
                "inputs",
                "outputs",
                "kernel workspaces",
            ),
        ),
        ("B", "engine's buffers", ()),
        ("C", "context and cache", ("allocator cache", "CUDA context", "NCCL")),
    )
)
"""In drawing order. A term that no group lists is an engine's buffer."""
_REST = next(group for group in GROUPS if not group.terms)


def group_of(term: str) -> Group:
    """Return the group of a term's name."""
    return next((group for group in GROUPS if term in group.terms), _REST)


def grouped(phase: PhaseMemory) -> tuple[tuple[Group, int], ...]:
    """Return the bytes of each group in one phase, without empty groups."""
    totals = dict.fromkeys(GROUPS, 0)
    for term in phase.terms:
        totals[group_of(term.name)] += term.num_bytes
    return tuple((group, num_bytes) for group, num_bytes in totals.items() if num_bytes)


def bar(phase: PhaseMemory, *, limit_bytes: int, width: int) -> str:
    """Return a phase as letters, WWOOGGAAAC..., each worth limit_bytes / width.

    Dots are free memory; a phase beyond the limit ends in ">".
    """
    cells, done, drawn = "", 0, 0
    for group, num_bytes in grouped(phase):
        done += num_bytes
        end = round(done / limit_bytes * width)
        cells += group.letter * (end - drawn)
        drawn = max(drawn, end)
    if drawn > width:
        return cells[: width - 1] + ">"
    return cells + "." * (width - drawn)
