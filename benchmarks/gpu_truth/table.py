"""Tables of results: a short one by group, and a long one with every case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from measuring.ladder import CPU
from measuring.ladder_table import ladder_table
from measuring.results import TrialState, peak_of

from gpu_truth.errors import LIMIT, Quantity, above_limit, case_errors, summaries, summaries_by_trait
from gpu_truth.failures import failure_lines
from gpu_truth.fits import fits_of_cases, fits_of_regret
from gpu_truth.verdict import best, counted, runs_of, speed, verdict
from zerofit.core.text_table import table_lines
from zerofit.core.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from measuring.ladder import Ladder, RungResult
    from measuring.results import TrialMeasurement

    from gpu_truth.errors import CaseError, Summary
    from gpu_truth.fits import Fits
    from gpu_truth.results import CaseResult, RegretResult, Results, Tried

_NOTHING = "-"
_MOST_LISTED = 12
"""Lines of the short table for errors above the limit, and for wrong predictions of what fits; the long one
has all. ASSUMPTION: so many leave the rest on a screen."""


def short_table(results: Results) -> str:
    """Return what is printed at the end: errors by group, regret by question, the ladder rung by rung.

    What failed comes first.
    """
    failed = failure_lines(results.failed)
    lines = [*failed, *([""] if failed else []), *_head(results)]
    for name, found in _kinds(results):
        errors = case_errors(found)
        lines += ["", *_ended(name, found), *_summary_lines(summaries(errors), "by group")]
        lines += _summary_lines(summaries_by_trait(errors), "by strategy")
        lines += _most(_fit_lines(fits_of_cases(found, memory_bytes=results.machine.memory_bytes)))
        large = above_limit(errors)
        lines += [_large(one) for one in large[:_MOST_LISTED]]
        if len(large) > _MOST_LISTED:
            lines.append(f"  and {len(large) - _MOST_LISTED} more above {LIMIT:.0%}")
    if results.regret:
        lines += ["", "regret", *table_lines([*_regret_rows(results.regret)])]
        lines += [f"  {one.key}: {counted(one)}" for one in results.regret]
        if not _is_cpu(results):
            lines += _most(_fit_lines(fits_of_regret(results.regret)))
    if results.ladder:
        lines += ["", "ladder", *table_lines([*_ladder_rows(results.ladder)])]
    if results.not_run:
        lines += ["", f"not run: {len(results.not_run)}, such as {results.not_run[0]}"]
    return "\n".join(lines) + "\n"


def full_table(results: Results) -> str:
    """Return all: the short table, then every case, every error above the limit, every strategy tried."""
    lines = [short_table(results)]
    for name, found in _kinds(results):
        lines += [f"{name}, each case", *table_lines([*_case_rows(found)]), ""]
        large = above_limit(case_errors(found))
        lines += [f"{name}, errors above {LIMIT:.0%}: {len(large)}", *map(_large, large), ""]
        lines += [*_fit_lines(fits_of_cases(found, memory_bytes=results.machine.memory_bytes)), ""]
    if results.regret and not _is_cpu(results):
        lines += [*_fit_lines(fits_of_regret(results.regret)), ""]
    for one in results.regret:
        lines += [f"regret, {one.key}", *table_lines([*_tried_rows(one)]), ""]
    if results.ladder:
        lines += [ladder_table(results.ladder), ""]
    if results.calibration:
        rates = (
            (rate.name.value, f"{rate.value:.4g} {rate.unit}", rate.source)
            for rate in results.calibration.rates
        )
        lines += ["rates", *table_lines([("of", "achieved", "how"), *rates])]
        lines += [*(f"  left out: {one}" for one in results.calibration.left_out), ""]
    lines += [f"not run: {one}" for one in results.not_run]
    return "\n".join(lines).rstrip() + "\n"


def _head(results: Results) -> Iterator[str]:
    machine, versions = results.machine, results.versions
    known = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes")
    named = [f"{name} {found}" for name in known if (found := getattr(versions, name))]
    driver = f", driver {machine.driver}" if machine.driver else ""
    yield f"{machine.device}, {format_bytes(machine.memory_bytes)}{driver}, {results.date}"
    yield f"python {versions.python}, {', '.join(named)}"
    if results.context:
        context = results.context
        yield (
            f"CUDA context {format_bytes(context.context_bytes)}, "
            f"with kernels {format_bytes(context.with_kernels_bytes)}"
        )


def _kinds(results: Results) -> list[tuple[str, tuple[CaseResult, ...]]]:
    found = (("accuracy", results.accuracy), ("ranks", results.ranks))
    return [(name, cases) for name, cases in found if cases]


def _ended(name: str, found: Sequence[CaseResult]) -> Iterator[str]:
    """Yield how the cases ended, and which did not run to their end."""
    counts = {state: sum(one.outcome.state is state for one in found) for state in TrialState}
    words = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    not_predicted = sum(one.predicted is None for one in found)
    yield f"{name}: {words}" + (f"; {not_predicted} without a prediction" if not_predicted else "")
    for one in found:
        if one.outcome.measured is None:
            yield f"  {one.case.key}: {one.outcome.state}: {one.outcome.reason}"


def _is_cpu(results: Results) -> bool:
    """Return True if there is no GPU, so that a limit is the process's and not the allocator's."""
    return results.machine.device == CPU


def _fit_lines(found: Fits) -> list[str]:
    """Return how often what fits was predicted, and each key that it was not; nothing without predictions."""
    if not found.num_right + len(found.did_not) + len(found.did):
        return []
    return [
        f"fits: {found.num_right} as predicted, {len(found.did_not)} predicted to fit and did not, "
        f"{len(found.did)} predicted not to fit and did",
        *(f"  predicted to fit and did not: {key}" for key in found.did_not),
        *(f"  predicted not to fit and did: {key}" for key in found.did),
    ]


def _most(lines: list[str]) -> list[str]:
    more = len(lines) - 1 - _MOST_LISTED
    return [*lines[: _MOST_LISTED + 1], *([f"  and {more} more"] if more > 0 else [])]


def _summary_lines(found: Sequence[Summary], grouped: str) -> list[str]:
    """Return a line a group, and in it median, 90th percentile and worst of each quantity, in percent."""
    if not found:
        return []
    quantities = [one for one in Quantity if any(each.quantity is one for each in found)]
    by_group = {(one.group, one.quantity): one for one in found}
    groups = dict.fromkeys(one.group for one in found)
    head = (f"errors in %, {grouped}: median/90 %/worst", "cases", *quantities)
    rows = []
    for group in groups:
        of_group = {quantity: by_group.get((group, quantity)) for quantity in quantities}
        num_cases = max(one.num_cases for one in of_group.values() if one)
        rows.append((group, str(num_cases), *map(_percents, of_group.values())))
    return table_lines([head, *rows])


def _large(one: CaseError) -> str:
    sizes = f"predicted {format_bytes(int(one.predicted))}, measured {format_bytes(int(one.measured))}"
    return f"  {one.error:+.1%} {one.quantity} of {one.key}: {sizes}"


def _case_rows(found: Sequence[CaseResult]) -> Iterator[tuple[str, ...]]:
    errors = case_errors(found)
    by_case = {(one.key, one.quantity): one for one in errors}
    of_memory = [one for one in Quantity if one is not Quantity.STEP_TIME]
    shown = [one for one in of_memory if any(each.quantity is one for each in errors)]
    sizes = [f"{one} MiB" for one in shown]
    yield ("case", "ended", *sizes, "process MiB", "context MiB", "step s", "predicted s", "took s", "note")
    for one in found:
        measured, predicted = one.outcome.measured, one.predicted
        yield (
            one.case.key,
            one.outcome.state.value,
            *(_cell(by_case.get((one.case.key, quantity))) for quantity in shown),
            _mib(measured.device_process_bytes if measured else None),
            _mib(measured.context_bytes if measured else None),
            f"{measured.step_time_s:.4f}" if measured else _NOTHING,
            f"{predicted.step_time_s:.4f}" if predicted and predicted.step_time_s else _NOTHING,
            f"{one.took_s:.1f}",
            one.outcome.reason or one.no_prediction or ("calibrates" if one.case.calibrates else ""),
        )


def _mib(num_bytes: int | None) -> str:
    return _NOTHING if num_bytes is None else f"{num_bytes / MIB:.0f}"


def _cell(error: CaseError | None) -> str:
    return _NOTHING if error is None else f"{error.measured / MIB:.0f} {error.error:+.1%}"


def _regret_rows(found: Iterable[RegretResult]) -> Iterator[tuple[str, ...]]:
    yield ("question", "limit", "choice", "of the best", "best", "otherwise")
    for one in found:
        fastest = best(one)
        choice = _tried(one.choice) if one.choice else "nothing fits"
        otherwise = "; ".join(_tried(other) for other in one.usual)
        yield (
            one.key,
            format_bytes(one.limit_bytes),
            choice,
            verdict(one),
            _tried(fastest) if fastest else _NOTHING,
            otherwise,
        )


def _tried_rows(one: RegretResult) -> Iterator[tuple[str, ...]]:
    yield ("", "strategy", "ended", "samples/s", "note")
    kinds = (("choice", (one.choice,) if one.choice else ()), ("grid", one.grid), ("otherwise", one.usual))
    for kind, tried in kinds:
        for each in tried:
            runs = ", ".join(f"{one:.1f}" for one in runs_of(each)) or _NOTHING
            note = "; ".join(filter(None, (each.note, each.outcome.reason)))
            yield (kind, each.name, each.outcome.state.value, runs, note)


def _tried(one: Tried) -> str:
    if one.outcome.state is TrialState.OUT_OF_MEMORY:
        return f"{one.name}: did not fit"
    if one.samples_per_s is None:
        return f"{one.name}: {one.outcome.state}"
    return f"{one.name}: {speed(one):.1f}/s"


def _ladder_rows(ladder: Ladder) -> Iterator[tuple[str, ...]]:
    """Yield a row a rung: the device figure is what nvidia-smi shows, as the published G are.

    Every rung takes as many samples a step, so that epochs are to each other as steps are.
    """
    memory = "process" if ladder.on_cpu else "allocated"
    yield ("rung", memory, "predicted", "device", "published G", "s a step", "x first", "published x")
    first = ladder.rungs[0] if ladder.rungs else None
    for rung in ladder.rungs:
        measured, published = rung.measured, rung.published
        predicted = rung.predicted.allocated_bytes if rung.predicted else None
        yield (
            rung.label,
            format_bytes(peak_of(measured)) if measured else rung.outcome.state.value,
            _size(predicted),
            _size(_shown_bytes(measured)),
            f"{published.memory_g:g}" if published else _NOTHING,
            f"{measured.step_time_s:.3g}" if measured else _NOTHING,
            *_times(rung, first),
        )


def _shown_bytes(measured: TrialMeasurement | None) -> int | None:
    """Return what all hold of the GPU, as nvidia-smi shows it, or what the driver says of the process."""
    if measured is None:
        return None
    return measured.device_bytes if measured.device_used_bytes is None else measured.device_used_bytes


def _times(rung: RungResult, first: RungResult | None) -> tuple[str, str]:
    """Return how many times the first rung's epoch one takes, as measured and as published."""
    own, base = rung.measured, first.measured if first else None
    own_published, base_published = rung.published, first.published if first else None
    return (
        f"{own.step_time_s / base.step_time_s:.2f}" if own and base else _NOTHING,
        f"{own_published.epoch_time_s / base_published.epoch_time_s:.2f}"
        if own_published and base_published
        else _NOTHING,
    )


def _size(num_bytes: int | None) -> str:
    return _NOTHING if num_bytes is None else format_bytes(num_bytes)


def _percents(one: Summary | None) -> str:
    if one is None:
        return _NOTHING
    return "/".join(f"{100 * size:.1f}" for size in (one.median, one.percentile_90, one.worst))
