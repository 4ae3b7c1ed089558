"""`make demo`: trains one model under ZeRO-3 on two ranks and in one process, and compares the losses."""

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

REPOSITORY = Path(__file__).resolve().parent.parent
OUTPUT = Path("demo-output")
SCRIPT = Path("examples/train_accelerate.py")

GLOBAL_BATCH_SIZE = 8
"""Blocks of 128 tokens in an optimizer step, over all ranks."""

TOLERANCE = 1e-3
"""Largest relative difference of a step's losses that rounding may explain. Measured: 1e-5 within 120 steps;
a rank that reads wrong samples makes it more than 1e-2."""

LOG_LINES_SHOWN = 30
POLL_INTERVAL_S = 0.2

PROGRESS_COLUMNS = (
    TextColumn("{task.description:<15}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("steps"),
    TimeElapsedColumn(),
    TextColumn("{task.fields[state]}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One of the two trainings."""

    title: str
    """As it is printed."""
    name: str
    """Of its output folder and of its log."""
    world_size: int
    """Ranks that share the global batch."""
    launch_flags: tuple[str, ...]
    """Of `zerofit launch`."""

    @property
    def output_dir(self) -> Path:
        return OUTPUT / self.name

    @property
    def log_file(self) -> Path:
        return OUTPUT / f"{self.name}.log"

    @property
    def metrics_file(self) -> Path:
        return self.output_dir / "metrics.jsonl"


ZERO3 = Training(
    title="ZeRO-3, 2 ranks",
    name="zero3",
    world_size=2,
    launch_flags=("--preset", "z3", "--cpu", "--num-processes", "2", "--mixed-precision", "no"),
)
ONE_PROCESS = Training(
    title="one process",
    name="one-process",
    world_size=1,
    launch_flags=("--cpu", "--num-processes", "1", "--mixed-precision", "no"),
)

Losses = dict[Training, list[float]]


def launch_arguments(training: Training, *, max_train_steps: int) -> list[str]:
    """Returns the arguments of zerofit: the same script, with the global batch divided among the ranks."""
    return [
        *("launch", *training.launch_flags, "--run-dir", str(OUTPUT / "zerofit-runs"), str(SCRIPT)),
        *("--output-dir", str(training.output_dir), "--data-dir", str(OUTPUT / "data")),
        *("--per-device-train-batch-size", str(GLOBAL_BATCH_SIZE // training.world_size)),
        *("--max-train-steps", str(max_train_steps)),
    ]


def read_losses(training: Training) -> list[float]:
    """Returns the loss of each step so far; the file may not exist yet, or end in half a line."""
    if not training.metrics_file.exists():
        return []
    complete_lines = training.metrics_file.read_text().split("\n")[:-1]
    return [values["loss"] for values in map(json.loads, complete_lines) if "loss" in values]


def run(training: Training, *, max_train_steps: int, progress: Progress, bar: TaskID) -> int:
    """Runs one training, with its output in its log, and returns its exit code."""
    shutil.rmtree(training.output_dir, ignore_errors=True)  # the tokenized text lies elsewhere and stays
    command = [sys.executable, "-m", "zerofit", *launch_arguments(training, max_train_steps=max_train_steps)]
    # OpenMP threads that spin while they wait train ten times slower where other work wants a core too.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    with training.log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    progress.start_task(bar)
    progress.update(bar, state="starting")
    try:
        while process.poll() is None:
            show_losses(training, progress, bar)
            time.sleep(POLL_INTERVAL_S)
    finally:
        if process.poll() is None:  # interrupted: zerofit takes its ranks along
            process.terminate()
        process.wait()
    show_losses(training, progress, bar)
    progress.stop_task(bar)
    return process.returncode


def show_losses(training: Training, progress: Progress, bar: TaskID) -> None:
    if losses := read_losses(training):
        progress.update(bar, completed=len(losses), state=f"loss {losses[-1]:.3f}")


def print_curves(losses: Losses, *, num_rows: int = 16, bar_width: int = 20) -> None:
    """Prints both curves as bars, a row for every few steps."""
    left, right = losses[ZERO3], losses[ONE_PROCESS]
    finite = [loss for loss in (*left, *right) if math.isfinite(loss)]
    lowest, highest = min(finite, default=0.0), max(finite, default=0.0)

    def cell(loss: float) -> str:
        share = (loss - lowest) / (highest - lowest) if math.isfinite(loss) and highest > lowest else 0.0
        return f"{loss:7.4f} {'#' * (1 + round(share * (bar_width - 1))):<{bar_width}}  "

    column = len(cell(0.0))
    titles = (f" {training.title}: loss" for training in (ZERO3, ONE_PROCESS))
    print(f"{'step':>6}  {''.join(f'{title:<{column}}' for title in titles)}difference")
    last = len(left) - 1
    for index in sorted({round(row * last / (num_rows - 1)) for row in range(num_rows)}):
        difference = abs(left[index] - right[index])
        print(f"{index + 1:>6}  {cell(left[index])}{cell(right[index])}{difference:10.1e}")


def largest_difference(losses: Losses) -> tuple[int, float]:
    """Returns the step where the two losses differ most, and by how much relative to the second."""
    pairs = zip(losses[ZERO3], losses[ONE_PROCESS], strict=True)
    differences = [abs(left - right) / abs(right) for left, right in pairs]
    # NaN compares with nothing: as infinity it is the largest of all.
    differences = [math.inf if math.isnan(difference) else difference for difference in differences]
    worst = max(range(len(differences)), key=differences.__getitem__)
    return worst + 1, differences[worst]


def find_problems(losses: Losses, *, max_train_steps: int) -> list[str]:
    """Returns what is wrong with the two curves: nothing, if both are whole, fall and agree."""
    incomplete = [
        f"{training.title}: {len(curve)} of {max_train_steps} steps are in {training.metrics_file}"
        for training, curve in losses.items()
        if len(curve) != max_train_steps
    ]
    if incomplete:
        return incomplete
    found = [
        f"{training.title}: the loss does not fall; it was {curve[0]:.4f} and is {curve[-1]:.4f}"
        for training, curve in losses.items()
        if not curve[-1] < curve[0]
    ]
    step, difference = largest_difference(losses)
    if difference > TOLERANCE:
        found.append(
            f"the losses do not agree: at step {step} they differ by {difference:.1e} of their value,"
            f" and rounding explains {TOLERANCE:.0e} at most"
        )
    return found


def print_failure(training: Training, exit_code: int) -> None:
    lines = training.log_file.read_text(errors="replace").replace("\r", "\n").splitlines()
    print(f"\ndemo: {training.title} ended with exit code {exit_code}. The end of {training.log_file}:\n")
    print("\n".join(lines[-LOG_LINES_SHOWN:]))


def run_folder(training: Training) -> str:
    """Returns the run folder that zerofit has named in its output."""
    marker = "zerofit: run folder "
    lines = training.log_file.read_text(errors="replace").splitlines()
    named = (line.removeprefix(marker) for line in lines if line.startswith(marker))
    return shown_path(Path(next(named, OUTPUT / "zerofit-runs")))


def shown_path(path: Path) -> str:
    """Returns a path as it can be typed in the repository, shorter where it lies inside."""
    return str(path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path)


def print_next(*, max_train_steps: int) -> None:
    zerofit = "zerofit" if shutil.which("zerofit") else shown_path(Path(sys.executable).parent / "zerofit")
    again = shlex.join(launch_arguments(ZERO3, max_train_steps=max_train_steps))
    print(f"""
Next, with your own script (any that uses Accelerator() or Trainer):
  {zerofit} launch --dry-run SCRIPT.py ARGUMENTS    what would run on this machine, and why
  {zerofit} launch SCRIPT.py ARGUMENTS              run it
  {zerofit} doctor                                  what this machine has and lacks
The first of the two trainings again:
  {zerofit} {again}""")


def report(losses: Losses, *, max_train_steps: int) -> int:
    """Prints the result of both trainings and returns the exit code of the demo."""
    problems = find_problems(losses, max_train_steps=max_train_steps)
    if len(losses[ZERO3]) == len(losses[ONE_PROCESS]) > 0:
        print()
        print_curves(losses)
        step, difference = largest_difference(losses)
        print(f"\nThe largest difference is {difference:.1e} of the loss, at step {step}.")
    if problems:
        print("\n".join(f"demo: {problem}" for problem in problems))
    else:
        print("Both losses fall, and they agree: ZeRO-3 trains the same model as one process does.")
    print("\nRun folders, each with the plan, the written configuration, the command and every rank's log:")
    for training in losses:
        print(f"  {training.title:<15}  {run_folder(training)}")
    if not problems:
        print_next(max_train_steps=max_train_steps)
    return 1 if problems else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-train-steps", type=int, default=120, help="of each training (default: 120)")
    args = parser.parse_args()
    if args.max_train_steps < 2:
        parser.error("--max-train-steps: two steps at least, or no curve can fall")
    return args


def main() -> int:
    max_train_steps = parse_args().max_train_steps
    os.chdir(REPOSITORY)
    OUTPUT.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as on Ctrl-C: no rank is left
    print(
        "A small language model learns the source of Python's library, twice (one to two minutes).",
        flush=True,
    )

    losses: Losses = {}
    with Progress(*PROGRESS_COLUMNS, console=Console(stderr=True)) as progress:
        bars = {
            training: progress.add_task(training.title, total=max_train_steps, start=False, state="waiting")
            for training in (ZERO3, ONE_PROCESS)
        }
        for training, bar in bars.items():
            exit_code = run(training, max_train_steps=max_train_steps, progress=progress, bar=bar)
            if exit_code:
                progress.stop()
                print_failure(training, exit_code)
                return exit_code
            losses[training] = read_losses(training)
    return report(losses, max_train_steps=max_train_steps)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
