"""The result of a regret question: how much of its grid ran, and the choice against the best."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from measuring.results import TrialState

from gpu_truth.store import LASTING

if TYPE_CHECKING:
    from gpu_truth.results import RegretResult, Tried

NUM_REPEATS = 2
"""Further runs of the choice and of its rival: with the first they make three, the fewest that have a median
apart from their extremes."""


def kept(result: RegretResult) -> tuple[Tried, ...]:
    """Return the choice and the part of the grid that no rule leaves out: what has to run."""
    return (
        *((result.choice,) if result.choice else ()),
        *(one for one in result.grid if one.left_out is None),
    )


def is_measured(result: RegretResult) -> bool:
    """Return True if all that the rules keep was run, so that a ratio to the best of it may be stated."""
    return all(one.outcome.state in LASTING for one in kept(result))


def is_whole(result: RegretResult) -> bool:
    """Return True if a later run of the harness has nothing left to run for a question."""
    lasting = all(one.outcome.state in LASTING for one in result.usual)
    return lasting and is_measured(result) and not lacks_repeats(result)


def is_cut_off(result: RegretResult) -> bool:
    """Return True if the budget cut a question off; failures do not count."""
    left = (*kept(result), *result.usual)
    return any(one.outcome.state is TrialState.NOT_RUN for one in left) or lacks_repeats(result)


def lacks_repeats(result: RegretResult) -> bool:
    """Return True if the choice or its rival is still to be measured again, now that all else was."""
    return is_measured(result) and any(
        len(one.repeats_samples_per_s) < NUM_REPEATS for one in compared(result)
    )


def compared(result: RegretResult) -> tuple[Tried, ...]:
    """Return the choice and its rival, the grid's fastest by its first run; none where one did not run."""
    ran = [one for one in result.grid if one.samples_per_s]
    if result.choice is None or not result.choice.samples_per_s or not ran:
        return ()
    return result.choice, max(ran, key=lambda one: one.samples_per_s or 0.0)


def speed(tried: Tried) -> float:
    """Return samples per second: the median of all runs; 0 of one that did not come to its end."""
    return float(statistics.median(runs_of(tried) or (0.0,)))


def runs_of(tried: Tried) -> tuple[float, ...]:
    """Return the samples per second of each run."""
    return (tried.samples_per_s, *tried.repeats_samples_per_s) if tried.samples_per_s else ()


def best(result: RegretResult) -> Tried | None:
    """Return the fastest that ran: of the choice and its rival where both did, else of all."""
    ran = compared(result) or tuple(one for one in (*kept(result), *result.grid) if one.samples_per_s)
    return max(ran, key=speed, default=None)


def ratio(result: RegretResult) -> float | None:
    """Return the choice's throughput by that of the best, both as medians of their runs.

    None where the choice did not run to its end, and where part of what the rules keep was not run: the best
    may be there.
    """
    found, choice = best(result), result.choice
    if found is None or choice is None or not choice.samples_per_s or not is_measured(result):
        return None
    return speed(choice) / speed(found)


def verdict(result: RegretResult) -> str:
    """Return the ratio with the spread of the choice's runs, or in words why there is none."""
    found, choice = ratio(result), result.choice
    if choice is None:
        ran = best(result)
        if ran is not None:
            return f"FAILED: nothing was said to fit, and {ran.name} ran"
        return "nothing fits, as was said" if is_measured(result) else "not whole"
    if choice.outcome.state is TrialState.OUT_OF_MEMORY:
        return "FAILED: the choice did not fit"
    if choice.outcome.state not in (TrialState.DONE, TrialState.NOT_RUN):
        return f"FAILED: the choice: {choice.outcome.state}"
    if found is None:
        return "not whole"
    runs = runs_of(choice)
    if len(runs) == 1:
        return f"{found:.2f} (one run)"
    return f"{found:.2f} ({len(runs)} runs, {min(runs):.1f} to {max(runs):.1f}/s)"


def counted(result: RegretResult) -> str:
    """Return a summary: how many ran, how the others ended, and how many each rule left out."""
    of = kept(result)
    states = Counter(one.outcome.state for one in of)
    words = [f"{states.pop(TrialState.DONE, 0)} of {len(of)} ran"]
    words += [f"{states.pop(TrialState.NOT_RUN)} cut off"] if TrialState.NOT_RUN in states else []
    words += [f"{count} {state}" for state, count in sorted(states.items())]
    rules = Counter(one.left_out for one in result.grid if one.left_out)
    words += [f"{count} left out: {rule}" for rule, count in sorted(rules.items())]
    over = [f"measured over {result.runs} runs of the harness"] if result.runs > 1 else []
    return "; ".join((", ".join(words), *over))
