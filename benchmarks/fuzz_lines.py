#!/usr/bin/env python3
"""2,000 command lines drawn over all verbs, each in a fork: no traceback, no hang, no file left.

A line that breaks one of these is printed with its number, and so is a slow one, by its CPU time, which does
not depend on how busy the machine is. --processes: lines that are run as real processes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from fuzzed_lines import Ended, lines, make_folder, run_line, run_process

SEED = 20261129
_SLOW_S = 15.0
"""CPU time of a line that is printed as slow. A plan of a small model takes half of that."""


def main() -> int:
    """Run the lines, print those that break something, and return 1 if any does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    codes, codes_of_processes, num_faults = Counter[int](), Counter[int](), 0
    with tempfile.TemporaryDirectory(prefix="zerofit-fuzz-") as made:
        folder = Path(made, "w")
        folder.mkdir()
        make_folder(folder)
        for number, line in enumerate(lines(arguments.seed, arguments.lines)):
            ended = run_line(line, folder)
            codes[ended.code] += 1
            num_faults += _tell(f"{number}", line, ended)
        for number, line in enumerate(lines(arguments.seed + 1, arguments.processes)):
            ended = run_process(line, folder)
            codes_of_processes[ended.code] += 1
            num_faults += _tell(f"process {number}", line, ended)
    print(f"{sum(codes.values())} lines: exit codes {dict(codes)}")
    print(f"{sum(codes_of_processes.values())} processes: exit codes {dict(codes_of_processes)}")
    print(f"{num_faults} faults")
    return 1 if num_faults else 0


def _tell(name: str, line: tuple[str, ...], ended: Ended) -> int:
    """Print what is wrong with a line, or that it is slow, and return how many faults it has."""
    faults = ended.faults()
    for fault in faults or ([f"{ended.cpu_s:.0f} s of CPU time"] if ended.cpu_s >= _SLOW_S else []):
        print(f"{name}: {[word[:60] for word in line]}\n  {fault}", flush=True)
    return len(faults)


if __name__ == "__main__":
    sys.exit(main())
