"""Measures what `zerofit launch` adds to plain `accelerate launch` of the same script.

Both run examples/train_accelerate.py in one process on the CPU, by turns, and every second pair in the other
order: the speed of a machine drifts. A pair gives one ratio of wall times; the result is the median of the
ratios. With --observation it is what the
live files of the ranks add to a `zerofit launch` without them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from circumstances import circumstances
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = REPOSITORY / "examples" / "train_accelerate.py"
TARGET_RATIO = 1.05
"""`zerofit launch` may add five percent to a run of a minute."""
ACCELERATE = "accelerate"
ZEROFIT = "zerofit"
UNOBSERVED = "zerofit without observation"
OBSERVATION_TARGET_RATIO = 1.01
"""Live files may add one percent."""
_NO_OBSERVATION = """
import sys
if "zerofit.training.runner" in sys.orig_argv:
    import zerofit.training.reporting.observe
    zerofit.training.reporting.observe.start = lambda *_, **__: None
"""
"""A sitecustomize.py that leaves the observation of a rank out."""
PACKAGES = ("accelerate", "deepspeed", "torch", "transformers")
LOG_LINES_SHOWN = 30


def command(launcher: str, folder: Path, *, max_train_steps: int) -> list[str]:
    """Returns one launch: the script's arguments are the same for both launchers."""
    launch = {
        ACCELERATE: [
            *("-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "1"),
            *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        ],
        ZEROFIT: [
            *("-m", "zerofit", "launch", "--cpu", "--num-processes", "1", "--mixed-precision", "no"),
            *("--run-dir", str(folder / "zerofit-runs")),
        ],
    }
    return [
        *(sys.executable, *launch[ACCELERATE if launcher == ACCELERATE else ZEROFIT], str(SCRIPT)),
        *("--output-dir", str(folder / launcher), "--data-dir", str(folder / "data")),
        *("--max-train-steps", str(max_train_steps)),
    ]


def time_launch(launcher: str, folder: Path, *, max_train_steps: int) -> float:
    """Runs one launch and returns its wall time in seconds; ends the benchmark if the launch fails."""
    # The same threads for both, whatever a launcher would choose; see demo.py for why they must not spin.
    threads = {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "PASSIVE"}
    if launcher == UNOBSERVED:
        (folder / "unobserved").mkdir(exist_ok=True)
        (folder / "unobserved" / "sitecustomize.py").write_text(_NO_OBSERVATION)
        threads["PYTHONPATH"] = f"{folder / 'unobserved'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    log_file = folder / f"{launcher}.log"
    with log_file.open("w") as log:
        started = time.perf_counter()
        ended = subprocess.run(
            command(launcher, folder, max_train_steps=max_train_steps),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
            cwd=folder,
        )
        wall_time_s = time.perf_counter() - started
    if ended.returncode:
        lines = log_file.read_text(errors="replace").replace("\r", "\n").splitlines()
        print("\n".join(lines[-LOG_LINES_SHOWN:]), file=sys.stderr)
        print(f"launch_overhead: {launcher} launch ended with exit code {ended.returncode}", file=sys.stderr)
        sys.exit(ended.returncode if ended.returncode > 0 else 128 - ended.returncode)
    return wall_time_s


def measure(*, baseline: str, num_pairs: int, max_train_steps: int) -> list[dict[str, float]]:
    """Returns the wall times of each pair, in seconds, and their ratio."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pairs = []
    with (
        tempfile.TemporaryDirectory(prefix="launch-overhead-") as folder,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task("", total=2 * num_pairs + 2)

        def timed(launcher: str, *, max_train_steps: int) -> float:
            progress.update(bar, description=f"{launcher} launch")
            wall_time_s = time_launch(launcher, Path(folder), max_train_steps=max_train_steps)
            progress.advance(bar)
            return wall_time_s

        for launcher in (baseline, ZEROFIT):  # tokenizes the text and fills the disk cache; not counted
            timed(launcher, max_train_steps=1)
        for number in range(num_pairs):
            order = (baseline, ZEROFIT) if number % 2 == 0 else (ZEROFIT, baseline)
            times = {launcher: timed(launcher, max_train_steps=max_train_steps) for launcher in order}
            baseline_s, zerofit_s = times[baseline], times[ZEROFIT]
            pairs.append({"baseline_s": baseline_s, "zerofit_s": zerofit_s, "ratio": zerofit_s / baseline_s})
    return pairs


def parse_args() -> argparse.Namespace:
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--num-pairs", type=int, default=3, metavar="N", help="pairs of runs (default: 3)")
    parser.add_argument(
        "--max-train-steps", type=int, default=500, metavar="N", help="default: 500, a minute on two cores"
    )
    parser.add_argument(
        "--observation", action="store_true", help="measure what the live files of the ranks add"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there, as JSON")
    args = parser.parse_args()
    if args.num_pairs < 1 or args.max_train_steps < 1:
        parser.error("--num-pairs and --max-train-steps: one at least")
    if args.out and not args.out.parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.parent}")
    return args


def main() -> int:
    args = parse_args()
    baseline = UNOBSERVED if args.observation else ACCELERATE
    target_ratio = OBSERVATION_TARGET_RATIO if args.observation else TARGET_RATIO
    pairs = measure(baseline=baseline, num_pairs=args.num_pairs, max_train_steps=args.max_train_steps)
    result = {
        "max_train_steps": args.max_train_steps,
        "pairs": pairs,
        "median_ratio": statistics.median(pair["ratio"] for pair in pairs),
        "baseline": baseline,
        "target_ratio": target_ratio,
        **circumstances(*PACKAGES),
    }
    for number, pair in enumerate(pairs, start=1):
        print(
            f"pair {number}: {baseline} launch {pair['baseline_s']:.2f} s,"
            f" zerofit launch {pair['zerofit_s']:.2f} s, ratio {pair['ratio']:.3f}"
        )
    met = result["median_ratio"] <= target_ratio
    print(
        f"median ratio {result['median_ratio']:.3f};"
        f" the target, {target_ratio} at most, is {'met' if met else 'missed'}"
    )
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
