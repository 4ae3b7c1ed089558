"""The answer of a plan in a few lines: what there is, what fits and what it changes, and the command."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder
from zerofit.core.strategy import Buckets
from zerofit.core.units import format_bytes
from zerofit.planning.evaluation import evaluation_lines
from zerofit.planning.options import MachineFlags
from zerofit.planning.plan_labels import (
    batch,
    fit_words,
    gpus_words,
    label,
    memory_label,
    model_words,
    range_label,
    step_time_label,
    terms_words,
    workload_words,
)
from zerofit.planning.plan_reasons import why_it_loses
from zerofit.planning.search import TIME_TIE_SHARE
from zerofit.planning.suggestions import effect_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.core.estimates import MemoryEstimate
    from zerofit.planning.problem import Problem
    from zerofit.planning.run_spec import RunSpec
    from zerofit.planning.search import EstimatedStrategy
    from zerofit.planning.solve import Answer
    from zerofit.planning.sources.typed_line import TypedLine
    from zerofit.planning.suggestions import Suggestion

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
    "shows_all",
    "prices",
    "num_nodes",
    "is_fast",
)
"""Parameters that `zerofit launch` does not need for the same plan, beside those of another machine."""
_WRITTEN = ("plot", "html")
"""Files that a plan writes even if nothing fits: a second plan would refuse to overwrite them."""
_ONLY_SHOWING = ("dry_run", "verbose", "quiet")
"""Parameters of `zerofit launch` that change nothing in a run."""


def machine_words(answer: Answer) -> str:
    """Return the GPUs: "8 x NVIDIA A100-SXM4-80GB", "2 nodes of 8 x ..."."""
    topology = answer.problem.topology
    gpus = gpus_words(answer.problem.machine)
    return f"{topology.num_nodes} nodes of {gpus}" if topology.num_nodes > 1 else gpus


def head_lines(answer: Answer) -> Iterator[str]:
    problem = answer.problem
    yield f"{model_words(problem.model)}, {workload_words(problem)}"
    per_gpu = f"{format_bytes(problem.device_bytes)} of {format_bytes(problem.card_bytes)} to be used"
    usable, whole = format_bytes(problem.host_bytes), format_bytes(problem.machine.host_memory_bytes)
    host = f"{usable} of host memory" if usable == whole else f"{usable} of {whole} of host memory"
    described = problem.spec.described
    if described.gpus is not None and described.host_ram is None:
        host += ", which is assumed: set --host-ram"
    yield f"on {machine_words(answer)}: {per_gpu} on each, {host}"
    if answer.screen is not None:
        yield "a screen by closed forms: a trace of the model says more"
    elif answer.is_fast:
        yield "estimated by closed forms, not by a trace of the model; the numbers are rougher"


def assumed_lines(answers: Sequence[Answer], *, explains: bool) -> list[str]:
    """Return what plans assume: a line for what all share, and one for each machine's own.

    Args:
        explains: True for a sentence each, with its reason.
    """
    shared = [note for note in answers[0].notes if all(note in answer.notes for answer in answers)]
    own = [
        (f"{machine_words(answer)}: ", [note for note in answer.notes if note not in shared])
        for answer in answers
    ]
    if explains:
        return [f"assumed: {name}{note}" for name, notes in [("", shared), *own] for note in notes]
    return [
        f"assumed: {name}{'; '.join(map(_short_note, notes))}"
        for name, notes in [("", shared), *own]
        if notes
    ]


_NOTE_WITH_FLAG = re.compile(r"(?P<what>[^,:]+).*: (?:set|say) (?P<flag>--[\w-]+)(?: .*)?")


def _short_note(note: str) -> str:
    """Return a note without its reason, if it ends in the flag that sets what it assumes."""
    found = _NOTE_WITH_FLAG.fullmatch(note)
    return note if found is None else f"{found['what']} ({found['flag']})"


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
    again = spec.typed.without(_WRITTEN).changed(changes)
    return str(again) if spec.described.gpus is not None else ""


def launch_line(spec: RunSpec) -> TypedLine:
    """Return the line that trains what a line plans, or shows without training; another verb's as it is."""
    typed = spec.typed
    if typed.verb[1:] == ("launch",):
        machine = () if spec.on_cpu else MachineFlags.__dataclass_fields__  # a rehearsal plans for others
        return typed.without({*_ONLY_SHOWING, *machine})
    if spec.target is None or typed.verb[1:] != ("plan",):
        return typed.without(_WRITTEN)
    left_out = {*_ONLY_PLANNING, *MachineFlags.__dataclass_fields__}
    return replace(typed.without(left_out), verb=("zerofit", "launch"))


def answer_lines(answer: Answer) -> list[str]:
    """Return the answer of a traced plan: what there is, and what fits and changes."""
    lines = as_it_is_lines(answer)
    if lines or answer.found.chosen is None:
        return lines
    return [_fits(answer.found.chosen, answer)]


def as_it_is_lines(answer: Answer) -> list[str]:
    """Return the verdicts on the unchanged script and on its configuration files, and what fits.

    Empty without a script and without files.
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
        lines.append(said)
    if chosen is not None and lines and (own is None or chosen.strategy != own.strategy):
        lines.append(_fits(chosen, answer))
    return lines


def hint_lines(answer: Answer) -> list[str]:
    """Return if evaluation does not fit, what would be faster, and if a trace may choose another strategy."""
    chosen, lines = answer.found.chosen, [*evaluation_lines(answer)]
    if answer.in_16_bits is not None and chosen is not None:
        lines += _hint(answer.in_16_bits, chosen)
    if answer.problem.spec.options.is_fast and answer.screen is None:
        lines.append("chosen by closed forms, and a trace may choose another: leave out --fast for that")
    return lines


def own_terms_line(answer: Answer) -> str:
    """Return the terms of the unchanged script's peak memory; empty without a script."""
    if answer.as_it_is is None:
        return ""
    peak = answer.as_it_is.estimate.device.peak
    name = as_it_is_name(has_files=answer.as_files_say is not None)
    return f"{name}, in {peak.phase.value}: {terms_words(peak)}"


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
    if (fitting := answer.in_own_buckets) is not None:
        size = format_bytes(judged.estimate.device.peak_bytes - fitting.estimate.device.peak_bytes)
        said += f"; its buckets take {size} more than those of `zerofit config`, with which it fits"
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


def _fits(chosen: EstimatedStrategy, answer: Answer) -> str:
    """Return what fits, with its memory, the time of its step, and what it changes in the training."""
    problem = answer.problem
    own = None if answer.as_it_is is None else answer.as_it_is.strategy
    strategy = label(chosen.strategy, problem.topology, beside=own)
    closely = " closely" if problem.is_close(chosen.estimate) else ""
    memory = _in_gib(chosen.estimate.device)
    words = f"what fits{closely}: {strategy}, batch {batch(chosen.strategy)}: {memory}"
    if chosen.estimate.step_time is not None:
        words += f", {step_time_label(chosen.estimate.step_time)} a step"
    return f"{words}; {effect_of(chosen.strategy, problem, own=own, cut_to=answer.cut_to)}"


def _in_gib(estimate: MemoryEstimate) -> str:
    return f"{format_bytes(estimate.peak_bytes)} ±{estimate.uncertainty:.0%}"


def _changed(chosen: EstimatedStrategy, own: EstimatedStrategy, problem: Problem) -> str:
    """Return why a script that fits unchanged is changed: flags, speed, or safety."""
    changes = [name for name, value in problem.said.strategy.items() if value != getattr(own.strategy, name)]
    flags = list(dict.fromkeys(map(problem.said.where, changes)))
    is_other_batch = chosen.strategy.samples_per_step != own.strategy.samples_per_step
    if is_other_batch and problem.said.has("global_batch_size"):
        flags.append("--global-batch-size")
    ratio = None if is_other_batch else speedup(chosen, own)
    speed = ""
    if ratio is not None and not 1 / 1.05 < ratio < 1.05:
        speed = f"about {ratio:.1f} x faster" if ratio > 1 else f"about {1 / ratio:.1f} x slower"
    if flags:
        listed = " and ".join(filter(None, (", ".join(flags[:-1]), flags[-1])))
        return f"changed as {listed} {'say' if len(flags) > 1 else 'says'}" + (f": {speed}" if speed else "")
    is_safer = problem.is_close(own.estimate) and not problem.is_close(chosen.estimate)
    return "changed to fit surely" if is_safer else f"changed: {speed}" if speed else "changed"


def speedup(other: EstimatedStrategy, own: EstimatedStrategy) -> float | None:
    """Return how many times as fast one strategy is as another; None if a time is unknown."""
    time, own_time = other.estimate.step_time, own.estimate.step_time
    return own_time.seconds / time.seconds if time is not None and own_time is not None else None


def _hint(other: EstimatedStrategy, chosen: EstimatedStrategy) -> Iterator[str]:
    ratio, precision = speedup(other, chosen), other.strategy.precision
    if ratio is not None and precision is not None and ratio > 1 + TIME_TIE_SHARE:
        flag = f"--mixed-precision {precision.value}"
        yield f"hint: {flag} is about {ratio:.1f} x faster and rounds more; --prefer-speed takes it"


def _largest(where: str, estimate: MemoryEstimate) -> str:
    peak = estimate.peak
    needed = [term for term in peak.terms if term.holder is not Holder.MAPPED]
    term = max(needed, key=lambda term: term.num_bytes)
    return f"Largest on the {where}, in {peak.phase.value}: {term.name}, {format_bytes(term.num_bytes)}."
