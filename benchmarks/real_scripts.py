"""Runs third-party scripts plainly and by `zerofit launch`, and compares what they trained.

The scripts are fetched by whoever runs this, into one folder, laid out as real_scripts_table.py names them.
Each runs offline, on models and data made for it, on the CPU: by plain `accelerate launch` in one process and
on two ranks, then captured, then by `zerofit launch` with a smaller micro-batch in one process, without and
with gradient checkpointing, and under ZeRO-2 and ZeRO-3 on two ranks. Results are kept in the file of --out,
and a run that is in it is not run again.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from real_scripts_table import SCRIPTS, SHARDED, Script

REPOSITORY = Path(__file__).resolve().parent.parent
SEMANTICS = REPOSITORY / "tests" / "semantics"
MEASURED = REPOSITORY / "benchmarks" / "measured" / "fsdp2_scripts.json"
sys.path[:0] = [str(REPOSITORY / "tests" / "support"), str(REPOSITORY / "tests" / "evidence")]
RUN_TIMEOUT_S = 600
LAST_LINES = 12
SAME = "same"
_REFUSAL = re.compile(r"error\[([a-z0-9-]+)\]")
STEP_SAMPLES, NUM_STEPS, SAVED_AFTER = 16, 10, 5
"""Under FSDP2: samples of a step over all ranks, steps, and the step whose checkpoint is resumed."""


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
    num_passes: int = 0
    """Of a rank in a step of STEP_SAMPLES samples; 0 leaves the script its own sizes."""
    precision: str = "no"
    """accelerate's mixed precision."""
    resumes: bool = False
    """True if it goes on with the checkpoint of the way "fsdp2"."""

    @property
    def is_plain(self) -> bool:
        """True if `accelerate launch` runs it."""
        return not self.flags


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
_FSDP2 = ("--engine", "fsdp2")


def _sharded(num_processes: int, *flags: str, num_passes: int = 2, resumes: bool = False) -> Way:
    """Return a way under FSDP2, in fp32."""
    return Way(
        num_processes=num_processes,
        flags=(*_FSDP2, *flags),
        compared_with="alone",
        num_passes=num_passes,
        resumes=resumes,
    )


SHARDED_WAYS = {
    "alone": Way(num_processes=1, num_passes=1),
    "ddp": Way(num_processes=2, num_passes=2),
    "ddp-4": Way(num_processes=4, num_passes=2),
    "fsdp2": _sharded(2),
    "kept": _sharded(2, "--no-reshard-after-forward"),
    "split": _sharded(2, "--micro-batch-size", "2", num_passes=1),
    "checkpointed": _sharded(2, "--gradient-checkpointing"),
    "four": _sharded(4),
    "hybrid": _sharded(4, "--dp-replicate-size", "2"),
    "resumed-1": _sharded(1, resumes=True),
    "resumed-2": _sharded(2, resumes=True),
    "resumed-4": _sharded(4, resumes=True),
    "ddp-bf16": Way(num_processes=2, num_passes=2, precision="bf16", compared_with="alone"),
    "bf16": Way(num_processes=2, flags=_FSDP2, num_passes=2, precision="bf16", compared_with="alone"),
}
"""Steps of the same samples in each; resumed-1 to resumed-4 on so many ranks, from a checkpoint of two. In
bf16 both FSDP2, which rounds the weights, and DDP, under autocast, are compared with fp32. What follows the
number of ranks is compared with DDP on as many instead of one process."""
ALL_WAYS = WAYS | SHARDED_WAYS


COMPARED_WHOLE = {"plain": "whole", "plain-2": "whole-2"}
"""What takes the place of a plain run that stock transformers trains wrongly."""


def reference(script: Script, way: str) -> str:
    """Return the way that has to train the same as this one; empty where there is none."""
    compared_with = ALL_WAYS[way].compared_with
    return COMPARED_WHOLE.get(compared_with, compared_with) if script.ignores_num_items else compared_with


def sharded_reference(script: Script, way: str) -> str:
    """Return the way that a way under FSDP2 has to train as; empty where there is none."""
    run = ALL_WAYS[way]
    if run.resumes and not script.resumes:
        return ""
    if not script.follows_ranks or not run.compared_with:
        return run.compared_with
    if run.resumes and run.num_processes != ALL_WAYS["fsdp2"].num_processes:
        return ""  # the steps before and behind the checkpoint are of different numbers of ranks
    return "ddp" if run.num_processes == ALL_WAYS["ddp"].num_processes else "ddp-4"


def is_needed(script: Script, way: str) -> bool:
    """Return True if a script is run in this way."""
    run = ALL_WAYS[way]
    if not run.num_passes:
        return script.ignores_num_items or not run.whole_batch
    return bool(sharded_reference(script, way)) or way in {
        sharded_reference(script, other) for other in SHARDED_WAYS
    }


def command(script: Script, way: str, *, scripts: Path, out: Path) -> list[str]:
    """Return the command that runs a script in this way.

    Args:
        script: what to run.
        way: one of WAYS.
        scripts: the folder of all fetched scripts.
        out: this run's folder. The script's own output lies beside it: the same arguments in each way let
            zerofit use a capture again. Under FSDP2 nothing is captured, and it lies within.
    """
    run = ALL_WAYS[way]
    target = script.command(str(scripts), str((out if run.num_passes else out.parent) / "output"))
    if run.num_passes:
        target += _of_step(script, run, out)
    if way == "captured":
        return [sys.executable, __file__, "capture", str(out), *target]
    if run.is_plain:
        whole = ["--per_device_train_batch_size", str(run.whole_batch), "--gradient_accumulation_steps=1"]
        return [*_plain_launcher(script, run), *target, *(whole if run.whole_batch else ())]
    if run.num_passes:
        ranks = ("--cpu", "--num-processes", str(run.num_processes), "--mixed-precision", run.precision)
        runs = ("--run-dir", str(out / "zerofit-runs"))
        return [sys.executable, "-m", "zerofit", "launch", *ranks, *run.flags, *runs, *target]
    return [
        *(sys.executable, "-m", "zerofit", "launch", "--cpu", "--gpus", f"{_GPU}:{run.num_processes}"),
        *("--num-processes", str(run.num_processes), "--mixed-precision", "no", *run.flags),
        *(() if "native" in run.flags else ("--offload-optimizer", "none")),
        *("--micro-batch-size", str(script.micro_batch_size), "--run-dir", str(out / "zerofit-runs")),
        *target,
    ]


def _num_passes(script: Script, run: Way) -> int:
    """Return the passes of a rank in a step of this script under FSDP2."""
    return run.num_passes if script.accumulates else 1


def _of_step(script: Script, run: Way, out: Path) -> list[str]:
    """Return the arguments that give a step its samples; what a run saves, and what it resumes."""
    passes = _num_passes(script, run)
    samples = STEP_SAMPLES // (run.num_processes * passes)
    sizes = script.sizes(samples=samples, passes=passes, steps=NUM_STEPS)
    sizes = [*script.long_epoch.split(), *sizes]
    if run.resumes:
        return [*sizes, *script.resuming(out.parent / "fsdp2" / "output", SAVED_AFTER)]
    return [*sizes, *(script.saving(SAVED_AFTER) if out.name == "fsdp2" else ())]


def _plain_launcher(script: Script, run: Way) -> list[str]:
    # `--cpu` would start one process alone; several see in the environment that they are on the CPU.
    ranks = "--multi_gpu" if run.num_processes > 1 else "--cpu"
    flags = f"{ranks} --num_processes={run.num_processes} --num_machines=1 --mixed_precision={run.precision}"
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
    run, out = ALL_WAYS[way], folder / "runs" / script.name / way
    for stale in (out, out.parent / "output"):
        shutil.rmtree(stale, ignore_errors=True)
    out.mkdir(parents=True)
    environment = {
        **os.environ,
        **({"ACCELERATE_USE_CPU": "true"} if run.is_plain else {}),
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
        process = _start(run)(
            command(script, way, scripts=scripts, out=out),
            cwd=folder / "bench",
            env=environment,
            stdout=file,
            stderr=file,
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
    if run.num_passes:
        refused = _REFUSAL.search(log.read_text(errors="replace")) if code else None
        apart = {"refused": refused[1]} if refused else _apart(script, way, folder)
        return result | {"of": row_digest(script, way)} | apart
    return result | (
        _captured(out) if way == "captured" else {"differences": _differences(script, way, folder)}
    )


def _start(run: Way) -> Callable[..., Any]:
    """Return what starts a command; many short runs are forks of one process, as those of the tests are."""
    if not run.num_passes:
        return partial(subprocess.Popen, stdin=subprocess.DEVNULL)
    from forked_programs import ForkedProgram

    return ForkedProgram


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


def _apart(script: Script, way: str, folder: Path) -> dict[str, Any]:
    """Return how far a run under FSDP2 is from the one that it is compared with.

    "loss" is the largest relative difference of a step, "weights" the distance in the end against the way
    that training took, "saved" the same of the saved files, "others" the steps of other samples or learning
    rates. A resumed run is compared over the steps that it took.
    """
    from records import distance, read_training

    runs, expected = folder / "runs" / script.name, sharded_reference(script, way)
    if not expected:
        return {}
    try:
        alone, seen = read_training(runs / expected / "record"), read_training(runs / way / "record")
    except ValueError as error:
        return {"others": [str(error)]}
    num_steps = NUM_STEPS - (SAVED_AFTER if ALL_WAYS[way].resumes else 0)
    # torch takes a step without samples where it loads an optimizer's shards (_init_optim_state).
    taken = [step for step in seen.steps if step.samples]
    if len(taken) != num_steps or len(alone.steps) != NUM_STEPS:
        return {"others": [f"{len(taken)} steps, and {len(alone.steps)} alone"]}
    pairs = list(zip(alone.steps[-num_steps:], taken, strict=True))
    others = [
        number
        for number, (one, other) in enumerate(pairs, start=NUM_STEPS - num_steps + 1)
        if one.samples != other.samples or not _same_rates(one.rates, other.rates)
    ]
    # A loop's losses are those of its passes; Trainer divides them before.
    theirs, ours = (1 if script.has_trainer else _num_passes(script, ALL_WAYS[of]) for of in (expected, way))
    apart = (abs(one.loss / theirs - other.loss / ours) / abs(one.loss / theirs) for one, other in pairs)
    way_length = float(alone.steps[-1].weights["way"])
    saved = _distance_of_files(*(saved_weights(runs / name / "output") for name in (expected, way)))
    return {
        "loss": _digits(max(apart)),
        "weights": _digits(distance(alone, seen)),
        "saved": None if saved is None else _digits(saved / way_length),
        **({"others": others} if others else {}),
    }


def _same_rates(expected: tuple[float, ...], seen: tuple[float, ...]) -> bool:
    return len(expected) == len(seen) and all(
        math.isclose(one, other, rel_tol=1e-9) for one, other in zip(expected, seen, strict=True)
    )


def saved_weights(output: Path) -> dict[str, Any]:
    """Return the weights that a script has saved at its end."""
    from safetensors.torch import load_file

    kept = [
        file
        for file in sorted(output.rglob("*.safetensors"))
        if not any(part.startswith(("checkpoint-", "step_")) for part in file.relative_to(output).parts)
    ]
    return {name: weight for file in kept for name, weight in load_file(file).items()}


def _distance_of_files(expected: dict[str, Any], seen: dict[str, Any]) -> float | None:
    """Return the distance of saved weights; infinite if their names differ, None if there are none."""
    if expected.keys() != seen.keys():
        return math.inf
    squares = [float((expected[name] - seen[name]).double().square().sum()) for name in expected]
    return math.sqrt(math.fsum(squares)) if squares else None


def _digits(number: float) -> float:
    return float(f"{number:.1e}")


def cell(result: dict[str, Any] | None) -> str:
    """Return one cell of the table."""
    if result is None:
        return "not run"
    if "refused" in result:
        return f"refused: {result['refused']}"
    if result["exit_code"] != 0:
        return f"failed ({result['exit_code']})"
    if "peak_host_bytes" in result:
        return f"yes, {result['capture_seconds']:.0f} s, {result['peak_host_bytes'] / 2**20:.0f} MiB"
    if "loss" in result or "others" in result:
        return " ".join(
            f"{name} {result[name]}" for name in ("loss", "weights", "saved", "others") if name in result
        )
    differences = result.get("differences")
    if differences is None:
        return "yes"
    return SAME if not differences else f"differs ({len(differences)})"


def row_digest(script: Script, way: str) -> str:
    """Return a hash of all that decides what a script trains in a way under FSDP2."""
    run = ALL_WAYS[way]
    run = dataclasses.replace(run, num_passes=_num_passes(script, run))
    arguments = " ".join(filter(None, (script.arguments, script.long_epoch)))
    if (expected := sharded_reference(script, way)) != run.compared_with:
        run = dataclasses.replace(run, compared_with=expected)
    decides = (arguments, (STEP_SAMPLES, NUM_STEPS, SAVED_AFTER), dataclasses.astuple(run))
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]


def write_sharded(results: dict[str, dict[str, Any]]) -> None:
    """Write what was compared under FSDP2 to the file that is kept.

    Rows of the file that were not run again stay there, if they are of these versions and of the scripts and
    ways as they are now.
    """
    from kept_measurements import measured_here

    told = ("of", "refused", "loss", "weights", "saved", "others")
    before = json.loads(MEASURED.read_text())
    kept = before["cases"] if before["versions"] == measured_here({}).versions else {}
    scripts = {script.name: script for script in SCRIPTS}
    rows: dict[str, dict[str, Any]] = {name: {} for name in SHARDED}
    for name, way in itertools.product(SHARDED, SHARDED_WAYS):
        row = results.get(name, {}).get(way) or kept.get(name, {}).get(way)
        if row and sharded_reference(scripts[name], way) and row.get("of") == row_digest(scripts[name], way):
            rows[name][way] = {key: row[key] for key in told if key in row}
    measured = measured_here({name: row for name, row in rows.items() if row})
    MEASURED.write_text(json.dumps(dataclasses.asdict(measured), indent=1) + "\n")


def print_sharded(results: dict[str, dict[str, Any]]) -> None:
    """Print a row for each script that FSDP2 was measured with."""
    shown = [way for way, run in SHARDED_WAYS.items() if run.compared_with]
    print(f"| script | {' | '.join(shown)} |")
    print("|---" * (len(shown) + 1) + "|")
    for name in SHARDED:
        print(f"| {name} | {' | '.join(cell(results.get(name, {}).get(way)) for way in shown)} |")


_SHOWN = {
    "sharded": "fsdp2",
    "kept": "kept",
    "split": "split",
    "checkpointed": "checkpointed",
    "4 ranks": "four",
    "2 x 2": "hybrid",
}
"""Columns of the page's table, and the ways in them."""


def page_table(cases: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the table of docs/fsdp2.md: how far losses in fp32 are apart at most."""
    resumed = [way for way, run in SHARDED_WAYS.items() if run.resumes]
    lines = [
        f"| script | {' | '.join(_SHOWN)} | resumed on ranks |",
        "|---" * (len(_SHOWN) + 2) + "|",
    ]
    for name, rows in cases.items():
        cells = [_loss(rows.get(way)) for way in _SHOWN.values()]
        ran = [way for way in resumed if way in rows]
        furthest = max((rows[way] for way in ran), key=lambda row: row["loss"], default=None)
        ranks = ", ".join(str(SHARDED_WAYS[way].num_processes) for way in ran)
        cells.append(f"{_loss(furthest)} ({ranks})" if ran else _loss(None))
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _loss(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return "refused" if "refused" in row else f"{row['loss']:.0e}" if row["loss"] else "0"


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
    parser.add_argument("--ways", nargs="+", choices=ALL_WAYS, help="these ways alone")
    parser.add_argument("--sharded", action="store_true", help="under FSDP2, on two and four ranks")
    parser.add_argument("--anew", action="store_true", help="run again what is in --out already")
    parser.add_argument("--keep", action="store_true", help=f"with --sharded: write {MEASURED.name}")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    folder = args.folder.resolve()
    if not (folder / "bench").exists():
        from made.workbench import make_workbench, save_labels

        make_workbench(folder / "bench")
        save_labels(folder / "cache")
    ways = args.ways or (SHARDED_WAYS if args.sharded else WAYS)
    for script in SCRIPTS:
        if script.name not in (args.only or (SHARDED if args.sharded else map(attrgetter("name"), SCRIPTS))):
            continue
        of_script = results.setdefault(script.name, {})
        for way in ways:
            if not is_needed(script, way) or (way in of_script and not args.anew):
                continue
            of_script[way] = run_script(script, way, scripts=args.scripts.resolve(), folder=folder)
            print(f"{script.name} {way}: {cell(of_script[way])}", file=sys.stderr, flush=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print_sharded(results) if args.sharded else print_table(results)
    if args.keep:
        write_sharded(results)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["capture"]:
        sys.exit(capture(Path(sys.argv[2]), tuple(sys.argv[3:])))
    if sys.argv[1:2] == ["gloo"]:
        train_on_gloo(sys.argv[2:])
    else:
        sys.exit(main())
