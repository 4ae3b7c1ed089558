"""Runs sections within a time budget, stores each measurement, and writes table and plot at the end."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_truth.builds import CpuAdamBuild
from gpu_truth.failures import find_failures, has_measured
from gpu_truth.machine import find_machine, gpu_of, record_of
from gpu_truth.order import make_folder
from gpu_truth.predictions import Circumstances, Predictions, with_prediction
from gpu_truth.results import Section, file_of
from gpu_truth.scatter import draw_scatter
from gpu_truth.sections import pending, run_section, settle
from gpu_truth.session import Session
from gpu_truth.store import open_store, read_store
from gpu_truth.table import full_table, short_table
from zerofit.core.atomic_file import write_whole
from zerofit.core.facts import Machine
from zerofit.machine.rates import catalog_rates
from zerofit.machine.versions import probe_versions

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_truth.order import Order
    from gpu_truth.store import Store

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""
_AT_THE_END_S = 6.0
"""ASSUMPTION: table and plot are written within that, matplotlib's import included."""
_SHARES = {
    Section.CONTEXT: 24,
    Section.ACCURACY: 34,
    Section.RANKS: 15,
    Section.REGRET: 18,
    Section.LADDER: 9,
}
"""Of the budget, in percent. ASSUMPTION, by the processes that each section starts. What one leaves goes to
those behind it."""
_MOST_FOR_BUILDS = 0.5
"""Of the budget: what a build takes beyond that comes on top, or nothing would be left to measure in."""
_MANY_CORES = 8
"""ASSUMPTION: with so many, processes that import do not slow the one that is measured."""


def measure_all(order: Order, *, started_at: float) -> int:
    """Measure, write the results, print the short table last, and return the exit code.

    It is 130 after Ctrl-C, and 1 where a section or one of its cases failed, or nothing at all was measured
    of what was left; what was measured is kept.

    Args:
        order: what is measured.
        started_at: when the program began, by time.monotonic().

    Raises:
        UserError: there is no GPU and the CPU was not asked for, the older results can't be read, or a folder
            can't be written.
    """
    if order.on_cpu:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads spin for one another where others run beside
    machine = find_machine(on_cpu=order.on_cpu)
    make_folder(order.out, "--out")
    with ExitStack() as stack:
        if order.logs is None:
            folder = Path(tempfile.mkdtemp(prefix="zerofit-truth-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        else:
            folder = order.logs
            make_folder(folder, "--logs")
        session = _session(order, machine, folder)
        was_left = any(_asked(session, section, session.left) for section in order.sections)
        code = _run_sections(order, session, stack, started_at + order.budget_s - _AT_THE_END_S)
    write_tables(session.store)
    results = session.store.results
    if code:
        return code
    if was_left and not has_measured(results, order.sections):
        _tell(f"exit 1: nothing was measured{'' if results.failed else ' within the budget'}")
        return 1
    for one in results.failed:
        _tell(f"exit 1: {one.section}: {one.num_failed} of {one.num_ended} failed")
    return int(bool(results.failed))


def dry_run(order: Order) -> str:
    """Return what would be measured, a line each; nothing is started or written.

    Raises:
        UserError: there is no GPU and the CPU was not asked for, or the older results can't be read.
    """
    session = _session(order, find_machine(on_cpu=order.on_cpu), order.out, sets_aside=False)
    store = session.store
    lines = [f"{store.results.machine.device}, within {order.budget_s:g} s, into {store.path}"]
    for section in order.sections:
        lines += [section.value, *(f"  {name}" for name in session.left(section))]
    return "\n".join(lines)


def predict_anew(path: Path) -> None:
    """Predict every case of a file of results with today's estimator, and write all its files anew.

    Raises:
        UserError: the file can't be read.
    """
    store = read_store(path)
    found = store.results
    gpu = gpu_of(found.machine)
    ladder = found.ladder and replace(
        found.ladder, rungs=tuple(replace(rung, predicted=None) for rung in found.ladder.rungs)
    )
    accuracy, ranks = (
        tuple(with_prediction(one, None) for one in kind) for kind in (found.accuracy, found.ranks)
    )
    store.results = replace(found, accuracy=accuracy, ranks=ranks, ladder=ladder)
    machine = Machine(
        gpus=(gpu,) if gpu else (),
        num_cpu_cores=found.machine.num_cpu_cores,
        host_memory_bytes=found.machine.host_memory_bytes,
        host_memory_available_bytes=found.machine.host_memory_bytes,
    )
    circumstances = Circumstances(machine=machine, versions=found.versions, rates=catalog_rates())
    with Predictions(circumstances) as predictions:
        predictions.start(pending(store.results, on_cpu=gpu is None))
        settle(store, predictions, on_cpu=gpu is None, until=None)
    write_tables(store)


def write_tables(store: Store) -> None:
    """Write the whole table and the plot beside the results, and print the short table."""
    write_whole(store.path.with_suffix(".txt"), full_table(store.results))
    try:
        draw_scatter(store.results, store.path.with_suffix(".png"))
    except ImportError:
        _tell("no plot: matplotlib is missing")
    print(short_table(store.results), end="", flush=True)


def _run_sections(order: Order, session: Session, stack: ExitStack, ends_at: float) -> int:
    """Run the sections, each within its share of what is left, and return 0, or the exit code of Ctrl-C."""
    code = 0
    before = session.store.results
    not_run = [one for one in before.not_run if one.split(" ")[0] not in order.sections]
    left = list(order.sections)
    try:
        ends_at += _build(order, session)
        while left:
            section = left[0]
            shares = [_SHARES[one] for one in left]
            share_s = max(0.0, ends_at - time.monotonic()) * shares[0] / sum(shares)
            _tell(f"{section}: {share_s:.0f} s")
            try:
                _start_predictions(order, session, stack, section)
                keys = run_section(section, session, ends_at=time.monotonic() + share_s)
            except Exception as error:
                traceback.print_exc()
                keys = (f"failed: {type(error).__name__}: {error}".splitlines()[0],)
                session.fail(section, keys[0].removeprefix("failed: "))
            not_run += [f"{section} {key}" for key in keys]
            left.remove(section)
            _settle(session, until=0.0)
        _settle(session, until=ends_at)
    except KeyboardInterrupt:
        code = INTERRUPTED
        not_run += [f"{section} interrupted" for section in left]
    failed = find_failures(session.store.results, order.sections, session.broken)
    others = tuple(one for one in before.failed if one.section not in order.sections)
    session.store.put(not_run=tuple(not_run), failed=(*failed, *others))
    return code


def _build(order: Order, session: Session) -> float:
    """Build what the sections need of DeepSpeed, and return by how many seconds that puts off their end."""
    if not any(_asked(session, section, session.needs_build) for section in order.sections):
        return 0.0
    session.build = CpuAdamBuild(session.folder / "cpu-adam.log", on_cpu=order.on_cpu)
    return max(0.0, session.build.wait(_tell) - order.budget_s * _MOST_FOR_BUILDS)


def _start_predictions(order: Order, session: Session, stack: ExitStack, section: Section) -> None:
    """Begin to predict once the context section is over, which wants the machine to itself."""
    if section is Section.CONTEXT or session.predictions is not None:
        return
    circumstances = Circumstances(machine=session.machine, versions=session.versions, rates=catalog_rates())
    session.predictions = stack.enter_context(Predictions(circumstances))
    session.predictions.start(pending(session.store.results, on_cpu=session.on_cpu))
    for one in order.sections:
        try:
            session.predictions.start(session.cases_left(one))
        except Exception as error:  # that section will say so itself when its turn comes
            _tell(f"nothing is predicted of {one}: {error}")


def _settle(session: Session, *, until: float) -> None:
    if session.predictions is not None:
        settle(session.store, session.predictions, on_cpu=session.on_cpu, until=until)


def _session(order: Order, machine: Machine, folder: Path, *, sets_aside: bool = True) -> Session:
    record, versions = record_of(machine), probe_versions()
    return Session(
        machine=machine,
        versions=versions,
        on_cpu=order.on_cpu,
        lookahead=_lookahead(machine) if order.lookahead is None else order.lookahead,
        folder=folder,
        store=open_store(file_of(order.out, record), record, versions, sets_aside=sets_aside),
        anew=order.anew,
    )


def _asked(session: Session, section: Section, question: Callable[[Section], object]) -> bool:
    """Return a session's answer about a section; False where it fails, as the section itself will then."""
    try:
        return bool(question(section))
    except Exception:
        return False


def _lookahead(machine: Machine) -> int:
    return 3 if machine.num_cpu_cores >= _MANY_CORES else 1


def _tell(words: str) -> None:
    print(f"measure_gpu: {words}", file=sys.stderr, flush=True)
