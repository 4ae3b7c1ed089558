"""Runs third-party scripts plainly and by `zerofit launch`, and compares what they trained.

The scripts are fetched by whoever runs this, into one folder, laid out as real_scripts_table.py names them.
Each runs offline, on models and data made for it, on the CPU: by plain `accelerate launch` in one process and
on two ranks, then captured, then by `zerofit launch` with a smaller micro-batch in one process, without and
with gradient checkpointing, and under ZeRO-2 and ZeRO-3 on two ranks. Results are kept in the file of --out,
and a run that is in it is not run again.
"""

import argparse
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_scripts_table import SCRIPTS, Script

REPOSITORY = Path(__file__).resolve().parent.parent
SEMANTICS = REPOSITORY / "tests" / "semantics"
sys.path.insert(0, str(REPOSITORY / "tests" / "support"))
RUN_TIMEOUT_S = 600
LAST_LINES = 12
SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of running a script."""

    num_processes: int
    flags: tuple[str, ...] = ()
    """Of `zerofit launch`."""
    compared_with: str = ""
    """The way that has to train the same; empty for a plain run."""
    whole_batch: int = 0
    """Samples of the script's optimizer step, where they go through one forward pass on one process."""


_GPU = "h100-80gb"
"""What the plan is made for; its ranks are rehearsed on the CPU."""
WAYS = {
    "plain": Way(num_processes=1),
    "plain-2": Way(num_processes=2),
    "whole": Way(num_processes=1, whole_batch=8),
    "whole-2": Way(num_processes=1, whole_batch=16),
    "captured": Way(num_processes=1),
    "applied": Way(num_processes=1, flags=("--engine", "native"), compared_with="plain"),
    "checkpointed": Way(
        num_processes=1,
        flags=("--engine", "native", "--gradient-checkpointing"),
        compared_with="plain",
    ),
    "zero-2": Way(num_processes=2, flags=("--zero-stage", "2"), compared_with="plain-2"),
    "zero-3": Way(num_processes=2, flags=("--zero-stage", "3"), compared_with="plain-2"),
}


COMPARED_WHOLE = {"plain": "whole", "plain-2": "whole-2"}
"""What takes the place of a plain run that stock transformers trains wrongly."""


def reference(script: Script, way: str) -> str:
    """Return the way that has to train the same as this one; empty where there is none."""
    compared_with = WAYS[way].compared_with
    return COMPARED_WHOLE.get(compared_with, "") if script.ignores_num_items else compared_with


def command(script: Script, way: str, *, scripts: Path, out: Path) -> list[str]:
    """Return the command that runs a script in this way.

    Args:
        script: what to run.
        way: one of WAYS.
        scripts: the folder of all fetched scripts.
        out: this run's folder. The script's own output lies beside it: the same arguments in each way let
            zerofit use a capture again.
    """
    target = script.command(str(scripts), str(out.parent / "output"))
    run = WAYS[way]
    if way == "captured":
        return [sys.executable, __file__, "capture", str(out), *target]
    if not run.compared_with:
        whole = ["--per_device_train_batch_size", str(run.whole_batch), "--gradient_accumulation_steps=1"]
        return [*_plain_launcher(script, run), *target, *(whole if run.whole_batch else ())]
    return [
        *(sys.executable, "-m", "zerofit", "launch", "--cpu", "--gpus", f"{_GPU}:{run.num_processes}"),
        *("--num-processes", str(run.num_processes), "--mixed-precision", "no", *run.flags),
        *(() if "native" in run.flags else ("--offload-optimizer", "none")),
        *("--micro-batch-size", str(script.micro_batch_size), "--run-dir", str(out / "zerofit-runs")),
        *target,
    ]


def _plain_launcher(script: Script, run: Way) -> list[str]:
    # `--cpu` would start one process alone; several see in the environment that they are on the CPU.
    ranks = "--multi_gpu" if run.num_processes > 1 else "--cpu"
    flags = f"{ranks} --num_processes={run.num_processes} --num_machines=1 --mixed_precision=no"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *flags.split(), "--dynamo_backend=no"]
    return [*launcher, __file__, "gloo"] if run.num_processes > 1 and script.has_trainer else launcher


def train_on_gloo(target: list[str]) -> None:
    """Run a script whose Trainer takes gloo; by itself it takes NCCL for several ranks, on the CPU too."""
    from transformers import TrainingArguments

    original = TrainingArguments.__post_init__

    def with_gloo(self: Any) -> None:
        self.ddp_backend = self.ddp_backend or "gloo"
        original(self)

    TrainingArguments.__post_init__ = with_gloo
    if target[0] == "-m":
        sys.argv, sys.path[0] = target[1:], str(Path.cwd())
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = target, str(Path(target[0]).parent)
        runpy.run_path(target[0], run_name="__main__")


def run_script(script: Script, way: str, *, scripts: Path, folder: Path) -> dict[str, Any]:
    """Run a script in one way, and return how that ended."""
    out = folder / "runs" / script.name / way
    for stale in (out, out.parent / "output"):
        shutil.rmtree(stale, ignore_errors=True)
    out.mkdir(parents=True)
    environment = {
        **os.environ,
        **({} if WAYS[way].compared_with else {"ACCELERATE_USE_CPU": "true"}),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "NLTK_DATA": str(folder / "bench" / "nltk_data"),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "RECORD_TRAINING": str(out / "record"),
        **({} if script.is_seeded else {"RECORD_SEED": "1"}),
        "PYTHONPATH": os.pathsep.join(
            (str(SEMANTICS / "recorder"), str(scripts / "lib"), os.environ.get("PYTHONPATH", ""))
        ),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    }
    started = time.perf_counter()
    log = out / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command(script, way, scripts=scripts, out=out),
            cwd=folder / "bench",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # it, and the ranks that it has started
            process.wait()
            code = f"still running after {RUN_TIMEOUT_S} s"
    result: dict[str, Any] = {"exit_code": code, "seconds": round(time.perf_counter() - started, 1)}
    if code != 0:
        result["last_lines"] = _last_lines(log)
    return result | (
        _captured(out) if way == "captured" else {"differences": _differences(script, way, folder)}
    )


def _last_lines(log: Path) -> list[str]:
    lines = [
        line for line in log.read_text(errors="replace").replace("\r", "\n").splitlines() if line.strip()
    ]
    return [line[:300] for line in lines[-LAST_LINES:]]


def capture(out: Path, target: tuple[str, ...]) -> int:
    """Capture a script and write what it trains into a folder; return an exit code."""
    from zerofit.core.capture import capture_to_json
    from zerofit.core.errors import UserError
    from zerofit.scripts.capture.capture import capture_script

    try:
        with capture_script(
            target,
            environment=os.environ,
            cwd=Path.cwd(),
            limit_s=RUN_TIMEOUT_S,
            cache_folder=None,
        ) as captured:
            (out / "capture.json").write_text(capture_to_json(captured.capture))
    except UserError as error:
        print(error)
        return error.exit_code
    return 0


def _captured(out: Path) -> dict[str, Any]:
    if not (out / "capture.json").exists():
        return {}
    capture = json.loads((out / "capture.json").read_text())
    return {
        "capture_seconds": capture["wall_time_s"],
        "peak_host_bytes": capture["peak_host_bytes"],
        "model": capture["model"]["class_path"],
    }


def _differences(script: Script, way: str, folder: Path) -> list[str] | None:
    """Return in what a run differs from the plain one; None where it is plain itself."""
    from records import differences, read_training

    runs = folder / "runs" / script.name
    expected = reference(script, way)
    if not expected:
        return None
    try:
        return differences(read_training(runs / expected / "record"), read_training(runs / way / "record"))
    except ValueError as error:
        return [str(error)]


def cell(result: dict[str, Any] | None) -> str:
    """Return one cell of the table."""
    if result is None:
        return "not run"
    if result["exit_code"] != 0:
        return f"failed ({result['exit_code']})"
    if "peak_host_bytes" in result:
        return f"yes, {result['capture_seconds']:.0f} s, {result['peak_host_bytes'] / 2**20:.0f} MiB"
    differences = result.get("differences")
    if differences is None:
        return "yes"
    return SAME if not differences else f"differs ({len(differences)})"


def print_table(results: dict[str, dict[str, Any]]) -> None:
    """Print a row for each script."""
    shown = [way for way, run in WAYS.items() if not run.whole_batch]
    print(f"| script | {' | '.join(shown)} | semantics equal |")
    print("|---" * (len(shown) + 2) + "|")
    for script in SCRIPTS:
        cells = [cell(results.get(script.name, {}).get(way)) for way in shown]
        compared = [text for text, way in zip(cells, shown, strict=True) if WAYS[way].compared_with]
        equal = "yes" if all(text == SAME for text in compared) else "no"
        print(f"| {script.name} | {' | '.join(cells)} | {'not run' if 'not run' in compared else equal} |")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scripts", type=Path, required=True, metavar="DIR", help="the fetched scripts")
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="for models, data and runs")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="results, as JSON")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these scripts alone")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="these ways alone")
    parser.add_argument("--anew", action="store_true", help="run again what is in --out already")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    folder = args.folder.resolve()
    if not (folder / "bench").exists():
        from made.workbench import make_workbench, save_labels

        make_workbench(folder / "bench")
        save_labels(folder / "cache")
    for script in SCRIPTS:
        if args.only and script.name not in args.only:
            continue
        of_script = results.setdefault(script.name, {})
        for way in args.ways:
            is_needed = script.ignores_num_items or not WAYS[way].whole_batch
            if not is_needed or (way in of_script and not args.anew):
                continue
            of_script[way] = run_script(script, way, scripts=args.scripts.resolve(), folder=folder)
            print(f"{script.name} {way}: {cell(of_script[way])}", file=sys.stderr, flush=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print_table(results)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["capture"]:
        sys.exit(capture(Path(sys.argv[2]), tuple(sys.argv[3:])))
    if sys.argv[1:2] == ["gloo"]:
        train_on_gloo(sys.argv[2:])
    else:
        sys.exit(main())
