#!/usr/bin/env python3
"""The mutation score: of small changes to the code, drawn by a seed, the share that a test fails by.

Mutants are those of cosmic-ray's operators in zerofit's estimates, planning, rules and runtime: 201 that are
counted together, and 100 more of the runtime alone. Each is put into a copy of the tree, and the tests that
execute its line run, cheapest first, until one fails; launches come last. Which tests these are is read off a
map that the first start makes, by one run of the suite in which the lines are marked.

FOLDER has the map, the mutants and each verdict as it comes: the same command goes on with a run that was
broken off, on the commit that it began with.

    mutation_score.py .mutation --minutes 55    begin, or go on for 55 minutes
    mutation_score.py NEW --map .mutation/map --after .mutation
                                                the same mutants against the tests of today, with an older map
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mutation_run.coverage_map import CoverageMap, read_at
from mutation_run.forked_tests import list_tests
from mutation_run.map_run import is_made, make_map
from mutation_run.mutants import draw_mutants, find_again
from mutation_run.results import (
    Run,
    Trial,
    Verdict,
    append_trial,
    read_run,
    read_trials,
    summary,
    survivors,
    write_run,
    write_whole,
)
from mutation_run.trials import copy_tree, run_trials

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mutation_run.mutants import Mutant

_TREE = Path(__file__).parents[1]
_RUN, _TRIALS, _SURVIVORS = "run.json", "trials.jsonl", "survivors.txt"
_BUDGET_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Mutants that are drawn together."""

    folder: str
    """Where, relative to the tree."""
    count: int
    seed: int
    is_extra: bool = False
    """Left out of the total."""

    @property
    def name(self) -> str:
        """The part's name in the tables."""
        return f"{self.folder}, {self.count} more" if self.is_extra else self.folder


PARTS = (
    Part(folder="zerofit/planning", count=67, seed=16),
    Part(folder="zerofit/checking/rules", count=67, seed=16),
    Part(folder="zerofit/training", count=67, seed=16),
    Part(folder="zerofit/training", count=100, seed=38, is_extra=True),
)


def draw(tree: Path, parts: Sequence[Part]) -> dict[str, list[Mutant]]:
    """Draw each part's mutants, none of them twice."""
    drawn: dict[str, list[Mutant]] = {}
    for part in parts:
        before = {mutant for mutants in drawn.values() for mutant in mutants}
        drawn[part.name] = draw_mutants(tree, part.folder, count=part.count, seed=part.seed, but=before)
    return drawn


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    # Not TemporaryDirectory: a fork that runs the exit handlers of this process would remove the folder.
    folder = Path(tempfile.mkdtemp(prefix="mutation-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def begin(options: argparse.Namespace) -> Run:
    """Return the run that a folder has begun, or begin one: draw mutants, or take those of an earlier run."""
    if (path := options.folder / _RUN).exists():
        run = read_run(path)
        _check_same(options, run)
        return run
    options.folder.mkdir(parents=True, exist_ok=True)
    command = ["git", "-C", str(options.tree), "rev-parse", options.revision]
    revision = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if options.after:
        earlier = read_run(options.after / _RUN)
        drawn, extra = earlier.drawn, earlier.extra
    else:
        with _temporary_folder() as folder:
            copy_tree(options.tree, folder / "tree", revision)
            drawn = draw(folder / "tree", options.parts)
        extra = tuple(part.name for part in options.parts if part.is_extra)
    run = Run(revision=revision, budget_s=options.budget, drawn=drawn, extra=extra)
    write_run(path, run)
    return run


def _check_same(options: argparse.Namespace, run: Run) -> None:
    """Refuse options that differ from those of the run."""
    names = tuple(read_run(options.after / _RUN).drawn if options.after else (p.name for p in options.parts))
    if names != tuple(run.drawn) or options.budget != run.budget_s:
        raise SystemExit(
            f"{options.folder} was begun with {', '.join(run.drawn)} and {run.budget_s:g} s a mutant: "
            "go on with the same options, or name a new folder"
        )


def finish_map(options: argparse.Namespace, run: Run, until: float | None) -> bool:
    """Make the map, or go on with it; return False if the time is up before it is whole."""
    if is_made(options.map):
        return True
    tree = options.map / "tree"
    if not (options.map / "groups.json").exists():  # also where a copy was broken off
        shutil.rmtree(tree, ignore_errors=True)
        copy_tree(options.tree, tree, run.revision)
    lines = [place for mutant in _found(run, tree) for place in read_at(tree, mutant)]
    parallel = ["-n", str(options.jobs + 1), "--dist", "loadfile"]
    if not make_map(tree, options.map, lines, parallel, until=until):
        return False
    shutil.rmtree(tree)
    return True


def _found(run: Run, tree: Path) -> list[Mutant]:
    """Return a run's mutants as they stand in a tree, but for those that are gone."""
    drawn = [mutant for mutants in run.drawn.values() for mutant in mutants]
    return [found for mutant in drawn if (found := find_again(mutant, tree)) is not None]


def try_mutants(options: argparse.Namespace, run: Run, until: float | None) -> None:
    """Try the mutants that have no verdict yet, in copies of the tree, until the time is up."""
    known = read_trials(options.folder / _TRIALS)
    left = [mutant for mutants in run.drawn.values() for mutant in mutants if mutant not in known]
    if not left:
        return
    earlier = read_trials(options.after / _TRIALS) if options.after else {}
    with _temporary_folder() as folder:
        trees = [folder / f"tree{number}" for number in range(options.jobs)]
        for tree in trees:
            copy_tree(options.tree, tree, run.revision)
        with ThreadPoolExecutor(len(trees)) as pool:
            tests = next(frozenset(names) for names in pool.map(list_tests, trees))
        suite = CoverageMap(folder=options.map, tests=tests)
        mutants, jobs = [], []
        for mutant in left:
            here = find_again(mutant, trees[0])
            if here is None:
                append_trial(options.folder / _TRIALS, mutant, Trial(verdict=Verdict.GONE))
                continue
            killer = earlier[mutant].killed_by if mutant in earlier else None
            choice = suite.choose(here, trees[0], budget_s=run.budget_s)
            mutants.append(mutant)
            jobs.append((here, choice.killer_first(killer, tests)))
        for number, trial in run_trials(trees, jobs, until=until):
            mutant = mutants[number]
            append_trial(options.folder / _TRIALS, mutant, trial)
            told = f"{mutant.file}:{mutant.line} {trial.verdict} {trial.killed_by or ''}".rstrip()
            print(
                f"{number + 1} of {len(mutants)}, {trial.seconds:.0f} s: {told}", file=sys.stderr, flush=True
            )


def report(folder: Path, run: Run) -> None:
    """Print the table, and write those that survived into a file."""
    trials = read_trials(folder / _TRIALS)
    write_whole(folder / _SURVIVORS, survivors(run, trials))
    print(f"At {run.revision[:8]}:")
    print(summary(run, trials))
    print(f"Those that survived are in {folder / _SURVIVORS}.")


def _part(text: str) -> Part:
    folder, count, seed = text.split(":")
    return Part(folder=folder, count=int(count), seed=int(seed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the map, try the mutants and print the share that is killed, or as much as there is time for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new, or of a run that goes on")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop in good order after this time")
    parser.add_argument("--map", type=Path, metavar="FOLDER", help="default: map/ in FOLDER")
    parser.add_argument(
        "--after",
        type=Path,
        metavar="FOLDER",
        help="an earlier run: the same mutants, each one's killer first",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        type=_part,
        default=PARTS,
        metavar="PART",
        help="FOLDER:COUNT:SEED of mutants to draw",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=_BUDGET_S,
        metavar="S",
        help="test time a mutant (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="default: %(default)s")
    parser.add_argument("--tree", type=Path, default=_TREE, help="a repository (default: this one)")
    parser.add_argument("--revision", default="HEAD", help="what is copied of it (default: %(default)s)")
    options = parser.parse_args(arguments)
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    options.folder = options.folder.resolve()
    options.map = (options.map or options.folder / "map").resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the copies of the tree
    run = begin(options)
    if not finish_map(options, run, until):
        print("The time is up, a part of the map is missing: the same command goes on")
        return 0
    try_mutants(options, run, until)
    report(options.folder, run)
    num_left = sum(map(len, run.drawn.values())) - len(read_trials(options.folder / _TRIALS))
    if num_left:
        print(f"The time is up, {num_left} mutants are left: the same command goes on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
