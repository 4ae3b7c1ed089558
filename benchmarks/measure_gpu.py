"""Measures on this machine what zerofit predicts: python benchmarks/measure_gpu.py --out DIR --budget 9m

Writes DIR/MACHINE.json after each measurement, and at the end DIR/MACHINE.txt and, where matplotlib is there,
DIR/MACHINE.png; prints a short table last. A later run goes on where one ended. Nothing is downloaded: models
have random weights. Ctrl-C keeps what was measured by then. Exits 1 where anything failed, which is said
first, or nothing was measured.

Wanted next, in this order, which the lists of cases keep:

1. SGD and frozen layers again (gpu_truth/cases.py, WANTED): their memory was off, and has changed since
2. steps of a few tokens under LoRA: their time is that of Python's calls
3. rank 0 of N under FSDP2, and what is left of ZeRO (gpu_truth/rank_cases.py)
4. Liger's kernels
5. packed bases: of one process, and sharded by FSDP2
6. the questions of regret
7. a Trainer's real out-of-memory, recovered to its end: not here, but by `zerofit launch` of
   examples/train_trainer.py while another process takes all but a few GiB of the GPU
"""

from __future__ import annotations

import time

_STARTED_AT = time.monotonic()

import argparse  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

from gpu_truth.harness import INTERRUPTED, dry_run, measure_all, predict_anew  # noqa: E402
from gpu_truth.order import Order, parse_budget, parse_sections  # noqa: E402
from gpu_truth.results import Section  # noqa: E402

from zerofit.core.errors import UserError  # noqa: E402


def main() -> int:
    """Run what the flags say and return the exit code."""
    args = parse_args()
    try:
        if args.predict_anew is not None:
            predict_anew(args.predict_anew)
            return 0
        order = Order(
            out=args.out,
            budget_s=args.budget,
            sections=args.sections,
            on_cpu=args.cpu,
            anew=args.anew,
            lookahead=args.lookahead,
            logs=args.logs,
        )
        if args.dry_run:
            print(dry_run(order))
            return 0
        return measure_all(order, started_at=_STARTED_AT)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def parse_args() -> argparse.Namespace:
    """Return the flags; a wrong one ends the program with 2."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--out", type=Path, metavar="DIR", help="takes the results; those there are gone on with"
    )
    what.add_argument(
        "--predict-anew",
        type=Path,
        metavar="FILE",
        help="measure nothing: predict the cases of these results with today's estimator",
    )
    parser.add_argument(
        "--budget", type=_flag(parse_budget), default="9m", help="540s, 9m or 1h; by default 9m"
    )
    parser.add_argument(
        "--sections",
        type=_flag(parse_sections),
        default=",".join(Section),
        help="with commas between; by default %(default)s",
    )
    parser.add_argument("--cpu", action="store_true", help="small models on the CPU, GPU or not")
    parser.add_argument("--anew", action="store_true", help="measure these sections again")
    parser.add_argument(
        "--lookahead",
        type=_flag(_count),
        metavar="N",
        help="processes that import while one is measured; by default 3, 1 on few cores",
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the processes print")
    parser.add_argument("--dry-run", action="store_true", help="print what would be measured, and stop")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no number: say 0, 1 or more")
    return int(text)


def _flag(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Return a parser whose error argparse prints as it stands."""

    def parsed(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


if __name__ == "__main__":
    sys.exit(main())
