#!/usr/bin/env python3
"""The mutation score: of small changes to the code, drawn by a seed, the share that a test fails by.

Mutants are those of cosmic-ray's operators in zerofit's estimates, planning, rules and runtime. Each is put
into a copy of the tree, and the tests that execute its line run, cheapest first, until one fails; launches
come last. Which tests these are is read off a map that --map makes by one run of the suite under coverage.

    mutation_score.py --map FOLDER                          run the suite once under coverage
    mutation_score.py --known FOLDER --out BEFORE.json      draw mutants and try them
    mutation_score.py --known FOLDER --after BEFORE.json --out AFTER.json
                                                            the same mutants against the tests of today
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mutation_run.coverage_map import Choice, CoverageMap, make_map
from mutation_run.mutants import Mutant, draw_mutants, find_again
from mutation_run.trials import Trial, Verdict, copy_tree, list_tests, run_trials

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PARTS = ("zerofit/planning", "zerofit/checking/rules", "zerofit/training")
SEED = 16
_TREE = Path(__file__).parents[1]

Results = list[tuple[Mutant, Trial]]


def summary(results: Iterable[tuple[Mutant, Trial]]) -> str:
    """Return the verdicts a part as lines of a table."""
    counts: dict[str, Counter[Verdict]] = {}
    for mutant, trial in results:
        part = "/".join(Path(mutant.file).parts[:2])
        counts.setdefault(part, Counter())[trial.verdict] += 1
    rows = [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]
    return "\n".join(
        [_row("part", [*Verdict, "killed, %"]), *(_row(part, _cells(one)) for part, one in rows)]
    )


def _cells(counts: Counter[Verdict]) -> list[str]:
    tried = sum(counts.values()) - counts[Verdict.GONE]
    killed = counts[Verdict.KILLED] + counts[Verdict.TIMED_OUT]
    return [*(str(counts[verdict]) for verdict in Verdict), f"{100 * killed / tried:.1f}" if tried else "-"]


def _row(part: str, cells: Iterable[str]) -> str:
    return f"{part:20}" + "".join(f"{cell:>11}" for cell in cells)


def read_results(path: Path) -> Results:
    """Read what an earlier run wrote."""
    rows = json.loads(path.read_text("utf-8"))["mutants"]
    return [
        (Mutant(**row["mutant"]), Trial(**{**row["trial"], "verdict": Verdict(row["trial"]["verdict"])}))
        for row in rows
    ]


def write_results(path: Path, results: Results, **about: object) -> None:
    """Write results, in the order of the code, with what they are of."""
    ordered = sorted(results, key=lambda one: (one[0].file, one[0].line, one[0].after))
    rows = [{"mutant": asdict(mutant), "trial": asdict(trial)} for mutant, trial in ordered]
    path.write_text(json.dumps({**about, "mutants": rows}, indent=1) + "\n", "utf-8")


def killer_first(choice: Choice, trial: Trial | None, tests: frozenset[str]) -> Choice:
    """Return the choice with what killed the mutant earlier in front: a test, or a file that did not load."""
    killer = trial.killed_by if trial is not None else None
    known = tuple(sorted(test for test in tests if killer in (test, test.partition("::")[0])))
    return replace(choice, files=(known, *choice.files)) if known else choice


def score(options: argparse.Namespace, folder: Path) -> Results:
    """Draw mutants, or take those of an earlier run, and try them in copies of the tree within a folder."""
    trees = [folder / f"tree{number}" for number in range(options.jobs)]
    for tree in trees:
        copy_tree(options.tree, tree, options.revision)
    tests = frozenset(list_tests(trees[0]))
    known = CoverageMap(folder=options.known, tests=tests)
    earlier = dict(read_results(options.after)) if options.after else {}
    each = -(-options.count // len(options.parts))
    drawn = (draw_mutants(trees[0], part, count=each, seed=options.seed) for part in options.parts)
    results: Results = []
    jobs = []
    for mutant in earlier or [mutant for part in drawn for mutant in part]:
        here, trial = find_again(mutant, trees[0]), earlier.get(mutant)
        if here is None:
            results.append((mutant, Trial(verdict=Verdict.GONE)))
        else:
            choice = known.choose(here, trees[0], budget_s=options.budget)
            jobs.append((here, killer_first(choice, trial, tests)))
    about = {"seed": options.seed, "revision": options.revision, "budget_s": options.budget}
    write_results(options.out, results, **about)
    for mutant, trial in run_trials(trees, jobs, budget_s=options.budget):
        results.append((mutant, trial))
        place = f"{len(results)} {mutant.file}:{mutant.line}"
        print(f"{place} {trial.verdict} {trial.killed_by or ''}", file=sys.stderr, flush=True)
        write_results(options.out, results, **about)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a map, or try mutants and print the share that is killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--map", type=Path, metavar="FOLDER", help="run the suite under coverage; FOLDER is new"
    )
    parser.add_argument("--known", type=Path, metavar="FOLDER", help="a map that --map made")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the results, written after each mutant")
    parser.add_argument(
        "--after", type=Path, metavar="FILE", help="an earlier run's results: the same mutants"
    )
    parser.add_argument("--count", type=int, default=200, help="mutants of all parts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="default: %(default)s")
    parser.add_argument(
        "--budget", type=float, default=75.0, metavar="S", help="test time a mutant (default: 75)"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", default=PARTS, help="folders of the code")
    parser.add_argument("--tree", type=Path, default=_TREE, help="a repository (default: this one)")
    parser.add_argument("--revision", default="HEAD", help="what is copied of it (default: %(default)s)")
    parser.add_argument("pytest", nargs="*", help="with --map, after --: pytest's arguments")
    options = parser.parse_args(arguments)
    if options.map:
        make_map(options.tree.resolve(), options.map.resolve(), options.pytest)
        return 0
    if not (options.known and options.out):
        parser.error("--known and --out are needed, or --map")
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        print(summary(score(options, Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
