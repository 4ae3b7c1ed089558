"""Measures what capturing a script costs, beside the plain start of the same script up to its first step.

Scripts are those of real_scripts_table.py, in the folder of --scripts. By turns, with no cache: the plain
start ends at its first optimizer step, the capture when the record is written. Last, a script that trains
a model of the size of Llama 3 70B from its configuration alone is captured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from real_scripts_table import SCRIPTS

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests" / "semantics"))
DEFAULT_SCRIPTS = ("run_clm", "run_clm_no_trainer", "run_glue_no_trainer", "run_summarization", "sft")
LIMIT_S = 600
LARGE_LIMIT_S, LARGE_LIMIT_BYTES = 120, 2 * 2**30
"""Of the model of 70 billion parameters, on two cores."""
LARGE_ARGUMENTS = (
    "--config_name models/llama-70b --tokenizer_name models/llama --train_file data/text_train.txt "
    "--validation_file data/text_validation.txt --block_size 32 --per_device_train_batch_size 4"
)


def environment(bench: Path, **more: str) -> dict[str, str]:
    """Return the environment of every process here: offline, with caches of its own."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(bench / "cache"),
        "NLTK_DATA": str(bench / "nltk_data"),
        "PATH": path,
        **more,
    }


def plain_start(target: list[str], bench: Path, file: Path) -> dict[str, Any]:
    """Run a script until its first optimizer step, and return its time and its largest memory."""
    file.unlink(missing_ok=True)
    ended = subprocess.run(
        [sys.executable, *target],
        cwd=bench,
        env=environment(
            bench,
            PYTHONPATH=str(REPOSITORY / "benchmarks" / "first_step"),
            FIRST_STEP_TO=str(file),
            ACCELERATE_USE_CPU="true",
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if not file.exists():
        raise SystemExit(f"capture_cost: {target[0]} took no step\n{ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def capture(target: list[str], bench: Path) -> dict[str, Any]:
    """Capture a script with no cache, and return its time, its largest memory, and the model's size."""
    from zerofit.scripts.capture.capture import capture_script

    started = time.perf_counter()
    with capture_script(
        tuple(target),
        environment=environment(bench),
        cwd=bench,
        limit_s=LIMIT_S,
        cache_folder=None,
    ) as captured:
        return {
            "seconds": time.perf_counter() - started,
            "peak_host_bytes": captured.capture.peak_host_bytes,
            "model": captured.capture.model.class_path,
            "num_parameters": sum(module.num_parameters for module in captured.capture.model.modules),
        }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scripts", type=Path, required=True, metavar="DIR", help="the fetched scripts")
    parser.add_argument("--only", nargs="*", default=DEFAULT_SCRIPTS, metavar="NAME", help="these scripts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there, as JSON")
    return parser.parse_args()


def main() -> int:
    from made.models import save_large_config
    from made.workbench import make_workbench

    args = parse_args()
    scripts = str(args.scripts.resolve())
    rows = []
    with tempfile.TemporaryDirectory(prefix="capture-cost-") as folder:
        bench = make_workbench(Path(folder) / "bench")
        save_large_config(bench / "models" / "llama-70b")
        for script in SCRIPTS:
            if script.name not in args.only:
                continue
            target = script.command(scripts, str(Path(folder) / "output"))
            plain_start(target, bench, Path(folder) / "first.json")  # fills the caches of data; not counted
            plain = plain_start(target, bench, Path(folder) / "first.json")
            rows.append({"script": script.name, "plain": plain, "capture": capture(target, bench)})
            print(row(rows[-1]), flush=True)
        target = next(script for script in SCRIPTS if script.name == "run_clm_no_trainer").command(
            scripts, ""
        )
        cost = capture([target[0], *LARGE_ARGUMENTS.split()], bench)
        large = {"script": "Llama 3 70B", "capture": cost}
        print(row(large), flush=True)
    if args.out:
        args.out.write_text(json.dumps([*rows, large], indent=1) + "\n")
    return int(cost["seconds"] > LARGE_LIMIT_S or cost["peak_host_bytes"] > LARGE_LIMIT_BYTES)


def row(result: dict[str, Any]) -> str:
    """Return one line of the table."""
    cells = [
        f"{result[name]['seconds']:.1f} s, {result[name]['peak_host_bytes'] / 2**20:.0f} MiB"
        if name in result
        else "can't start"
        for name in ("plain", "capture")
    ]
    return f"| {result['script']} | {cells[0]} | {cells[1]} | {result['capture']['num_parameters']:,} |"


if __name__ == "__main__":
    sys.exit(main())
