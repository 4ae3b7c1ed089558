#!/usr/bin/env python3
"""2,000 command lines drawn over all verbs, each in a fork: no traceback, no hang, no file left.

A line that breaks one of these is printed with its number. --processes: lines that are run as real processes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from fuzzed_lines import LIMIT_S, lines, make_folder, run_line

SEED = 20261129


def main() -> int:
    """Run the lines, print those that break something, and return 1 if any does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    codes, num_faults = Counter[int](), 0
    with tempfile.TemporaryDirectory(prefix="zerofit-fuzz-") as made:
        folder = Path(made, "w")
        folder.mkdir()
        make_folder(folder)
        for number, line in enumerate(lines(arguments.seed, arguments.lines)):
            ended = run_line(line, folder)
            codes[ended.code] += 1
            for fault in ended.faults():
                num_faults += 1
                print(f"{number}: {[word[:60] for word in line]}\n  {fault}", flush=True)
        for line in lines(arguments.seed + 1, arguments.processes):
            ran = subprocess.run(
                [sys.executable, "-m", "zerofit", *line],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=4 * LIMIT_S,  # an import alone takes half a minute on a busy machine
                check=False,
            )
            if b"Traceback (most recent call last)" in ran.stderr:
                num_faults += 1
                print(f"{[word[:60] for word in line]}\n{ran.stderr[-1500:].decode()}", flush=True)
    print(f"{sum(codes.values())} lines, {arguments.processes} processes: exit codes {dict(codes)}")
    print(f"{num_faults} faults")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
