"""Measures how much slower than the exhaustive best `zerofit tune` may end: small cases on CPU ranks.

Every strategy of a small grid is run as one trial of `zerofit tune`. From these times follows what it would
have found with 1, 2, 3 ... trials, and the regret of each: its fastest, held against the fastest of all.
Plans are for GPUs that the CPU ranks rehearse: the predicted order was not made for this machine. Run again
with the same --out, the smaller of a strategy's times counts.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from circumstances import circumstances

import zerofit
from zerofit.cli.output.console import Console
from zerofit.core.plan import Plan
from zerofit.launching.trials import TrialEnd, TrialResult, Tuning, next_to_try
from zerofit.planning.plan_labels import batch, label

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ALL = 40
"""Trials that no case needs."""
SIZES = ("--sequence-length=64", "--hidden-size=128", "--num-layers=4", "--vocab-size=512")
COMMON = ("--output-dir=out", "--max-train-files=12", "--max-eval-samples=8", *SIZES)
CASES = {
    "accelerate, two ranks: stage and micro-batch": (
        ("train_accelerate.py", *COMMON, "--max-train-steps=60", "--per-device-train-batch-size=4"),
        {
            "gpus": "2xRTX4090",
            "num_processes": 2,
            "optimizer": "adamw",
            "gradient_checkpointing": False,
        },
    ),
    "accelerate, one rank: checkpointing and micro-batch": (
        ("train_accelerate.py", *COMMON, "--max-train-steps=60", "--per-device-train-batch-size=8"),
        {"gpus": "1xRTX4090", "num_processes": 1, "optimizer": "adamw"},
    ),
    "Trainer, two ranks: stage and checkpointing": (
        (
            "train_trainer.py",
            *(word.replace("-", "_").replace("__", "--", 1) for word in COMMON),
            *("--max_steps=60", "--per_device_train_batch_size=4", "--disable_tqdm=true"),
        ),
        {"gpus": "2xRTX4090", "num_processes": 2, "optimizer": "adamw", "micro_batch_size": 4},
    ),
}
"""Script with its arguments, and what the plan keeps to."""
PACKAGES = ("accelerate", "deepspeed", "torch", "transformers")


def measure(words: tuple[str, ...], settings: dict[str, object], *, num_timed: int) -> Tuning:
    """Returns a trial of every strategy of a case."""
    script, *arguments = words
    tuning: Tuning = zerofit.tune(
        str(EXAMPLES / script),
        *arguments,
        on_cpu=True,
        num_trials=ALL,
        num_timed=num_timed,
        observer=Console(shows_details=False),
        **settings,
    )
    return tuning


def words_of(plan: Plan) -> str:
    """Returns a strategy in words."""
    return f"{label(plan.strategy, plan.topology)}, {batch(plan.strategy)}"


def regrets(plans: Sequence[Plan], times: Mapping[str, Sequence[float]]) -> list[dict[str, object]]:
    """Returns what a number of trials finds: its fastest, and how much slower than the fastest of all.

    Args:
        plans: in the order of their predictions.
        times: measured step times by words_of; the least of each counts, as what else runs only adds to it.
    """
    results = {name: TrialResult(end=TrialEnd.MEASURED, step_time_s=min(of)) for name, of in times.items()}
    least_s = min(min(of) for of in times.values())
    found: list[dict[str, object]] = []
    for number in range(1, len(plans) + 1):
        planned = plans[: 1 + 4 * number]  # as many as `zerofit tune` plans for so many trials
        tried: dict[int, TrialResult] = {}
        while len(tried) < number and (place := next_to_try(planned, tried)) is not None:
            tried[place] = results[words_of(planned[place])]
        best = min(tried, key=lambda place: tried[place].step_time_s or 0.0)
        regret = (tried[best].step_time_s or 0.0) / least_s - 1
        found.append({"trials": number, "fastest": words_of(planned[best]), "regret": regret})
    return found


def parse_args() -> argparse.Namespace:
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps (default: 10)")
    parser.add_argument("--case", type=int, choices=range(1, len(CASES) + 1), help="only this one")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the result there, as JSON; times in it count too"
    )
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps: one at least")
    if args.out and not args.out.parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.parent}")
    return args


def main() -> int:
    args = parse_args()
    out = args.out and args.out.resolve()
    earlier = json.loads(out.read_text())["cases"] if out and out.exists() else {}
    cases = dict(earlier)
    for number, (name, (words, settings)) in enumerate(CASES.items(), start=1):
        if args.case not in (None, number):
            continue
        with tempfile.TemporaryDirectory(prefix="tune-regret-") as folder:
            os.chdir(folder)
            load = os.getloadavg()[0]
            tuning = measure(words, settings, num_timed=args.steps)
            os.chdir("/")
        measured = {words_of(one.plan): one.result.step_time_s for one in tuning.tried}
        if len(measured) < len(tuning.candidates) or None in measured.values():
            print(f"tune_regret: {name}: not every strategy was measured", file=sys.stderr)
            return 1
        before = earlier.get(name, {"loads": [], "step_times_s": {}})
        times = {one: [*before["step_times_s"].get(one, ()), step_s] for one, step_s in measured.items()}
        rows = regrets(tuning.candidates, times)
        cases[name] = {"loads": [*before["loads"], load], "step_times_s": times, "regrets": rows}
        print(f"{name}: {len(times)} strategies")
        for row in rows[:8]:
            print(f"  {row['trials']} trials: {row['regret']:.1%} regret, {row['fastest']}")
    if out:
        result = {
            "cases": cases,
            "timed_steps": args.steps,
            **circumstances(*PACKAGES),
        }
        out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
