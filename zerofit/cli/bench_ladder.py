"""zerofit bench ladder: strategies one after another, each measured in a fresh process."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zerofit.cli.ladder_checks import check_steps
from zerofit.cli.output.console import Console
from zerofit.cli.output.ladder_table import head_words, ladder_table
from zerofit.cli.parameters import CONTEXT, Number, Verb, Word
from zerofit.configs.write.write_files import file_exists, write_files
from zerofit.core.errors import UserError
from zerofit.core.units import format_bytes
from zerofit.machine.library_versions import check_libraries
from zerofit.machine.machine_spec import machine_of_spec
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import probe_versions
from zerofit.measuring.order import Order
from zerofit.measuring.parent import InterruptedRungError
from zerofit.measuring.refusals import check_reads_tokens
from zerofit.measuring.results import CPU, Outcome, RungState, ladder_to_json, peak_of
from zerofit.measuring.rungs import (
    DEFAULT_RUNGS,
    PUBLISHED_BATCH,
    PUBLISHED_LENGTH,
    PUBLISHED_MODEL,
    baseline,
    changes,
    climb,
    parse_rungs,
    rung_names,
)
from zerofit.models.dimensions import check_sequence_length
from zerofit.models.find import probe_model
from zerofit.models.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.core.facts import GpuSpec
    from zerofit.measuring.results import Ladder, Predicted
    from zerofit.measuring.rungs import Step

_CPU_MODEL = "all-minilm-l6-v2"
"""A BERT of 23 M parameters, whose activations at the default sizes are a GiB or more, and its weights,
gradients and states a tenth of that each, so that every rung shows."""
_CPU_STEPS, _GPU_STEPS = 2, 10
"""ASSUMPTION: on the CPU memory is what one looks for; on a GPU steps are short."""
_LIMIT_S = 1800
"""ASSUMPTION: no rung of a model that one measures takes half an hour; --rung-limit says otherwise."""
_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""
_POSITIVE = Number(int, least=1)


@click.command(
    cls=Verb, context_settings=CONTEXT, epilog=f"Rungs: {', '.join(rung_names())}; N is any number."
)
@click.option(
    "--model",
    metavar="NAME|FOLDER|FILE",
    help=f"A model's config; weights are random. By default {PUBLISHED_MODEL}, on the CPU {_CPU_MODEL}.",
)
@click.option(
    "--task", type=Word("task", {task.value: task for task in Task}), help="What the model's head is for."
)
@click.option("--rungs", default=DEFAULT_RUNGS, show_default=True, help="Rungs, in the order of the ladder.")
@click.option("--alone", is_flag=True, help="Each rung alone on the baseline, not on top of those before it.")
@click.option(
    "--batch-size",
    type=_POSITIVE,
    default=PUBLISHED_BATCH,
    show_default=True,
    help="Samples of an optimizer step, on the rank that is measured.",
)
@click.option(
    "--seq-len",
    "sequence_length",
    type=_POSITIVE,
    default=PUBLISHED_LENGTH,
    show_default=True,
    help="Tokens a sample.",
)
@click.option(
    "--attention",
    type=Word("attention", {name: name for name in ("eager", "sdpa")}),
    default="eager",
    show_default=True,
    help="transformers' attention of the baseline; eager as in the published ladder.",
)
@click.option(
    "--ranks",
    "num_ranks",
    type=_POSITIVE,
    default=1,
    show_default=True,
    help="Under ZeRO, be rank 0 of so many, among collectives that exchange nothing.",
)
@click.option(
    "--steps",
    "num_steps",
    type=_POSITIVE,
    help=f"Steps that are timed, after the warm-up; by default {_GPU_STEPS}, on the CPU {_CPU_STEPS}.",
)
@click.option("--cpu", "on_cpu", is_flag=True, help="Measure on the CPU, GPUs or not.")
@click.option(
    "--gpus", metavar="SPEC", help="Predict for this GPU, such as A100-80G, in place of the one here."
)
@click.option(
    "--rung-limit",
    "limit_s",
    metavar="SECONDS",
    type=Number(float, least=1),
    default=_LIMIT_S,
    show_default=True,
    help="How long one rung may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the tables.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw memory and time into a file."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write ladder.json, ladder.txt and each rung's log into a folder.",
)
@click.option("--force", is_flag=True, help="Write over a ladder in that folder, or a plot.")
@click.option("--dry-run", is_flag=True, help="Print the rungs and what each changes, and run nothing.")
def ladder(
    *,
    model: str | None,
    task: Task | None,
    rungs: str,
    alone: bool,
    batch_size: int,
    sequence_length: int,
    attention: str,
    num_ranks: int,
    num_steps: int | None,
    on_cpu: bool,
    gpus: str | None,
    limit_s: float,
    as_json: bool,
    plot: Path | None,
    output: Path | None,
    force: bool,
    dry_run: bool,
) -> int:
    """Measure memory, time and loss of one strategy after another, beside the prediction.

    Each rung trains the same model with random weights on the same batch, in a fresh process: the first
    steps without dropout, for losses that can be compared, then those that are timed. A rung that can't run
    here, or runs out of memory, says so, and the others go on. Exits 1 where none ran.
    """
    named = parse_rungs(rungs)
    base = baseline(
        batch_size=batch_size, sequence_length=sequence_length, attention=attention, num_ranks=num_ranks
    )
    steps = climb(named, base, is_cumulative=not alone)
    if plot is not None:
        from zerofit.cli.draw_plot import check_can_plot

        check_can_plot(plot, force=force)
    if output is not None and not force and (output / "ladder.json").exists():
        raise file_exists(str(output / "ladder.json"), flag="--output FOLDER")
    check_libraries(Console())
    here = () if on_cpu else probe_machine().gpus
    said_model = model or (PUBLISHED_MODEL if here else _CPU_MODEL)
    source = probe_model(said_model, task=task)
    check_reads_tokens(source, said=said_model)
    check_sequence_length(source.facts, sequence_length, None)
    versions = probe_versions()
    check_steps(steps, source.facts, num_ranks=num_ranks, on_cpu=not here, versions=versions)
    order = Order(
        said_model=said_model,
        model=source,
        base=base,
        rungs=named,
        is_cumulative=not alone,
        device=here[0].name if here else CPU,
        on_cpu=not here,
        num_steps=num_steps or (_GPU_STEPS if here else _CPU_STEPS),
        limit_s=limit_s,
        versions=versions,
    )
    gpu = _one_gpu(gpus) if gpus else next(iter(here), None)
    if dry_run:
        click.echo(_dry_run(order, as_json=as_json))
        return 0
    with _folder(output) as folder:
        measured, is_interrupted = _measure(order, folder)
    steps = tuple(step for step, _ in measured)
    predicted = _no_prediction(steps)
    if not is_interrupted:
        is_interrupted = _predict(order, steps, gpu, predicted)
    result = order.ladder(measured, predicted, predicted_for=gpu)
    click.echo(ladder_to_json(result).rstrip() if as_json else ladder_table(result))
    _write(result, output=output, plot=plot)
    if is_interrupted:
        return _INTERRUPTED
    return 0 if any(outcome.measured for _, outcome in measured) else 1


def _measure(order: Order, folder: Path) -> tuple[list[tuple[Step, Outcome]], bool]:
    """Return how each rung ended, and whether Ctrl-C ended the rest."""
    ended: list[tuple[Step, Outcome]] = []
    start = time.monotonic()
    try:
        for step, outcome in order.measure(folder):
            head = f"zerofit: rung {len(ended) + 1} of {len(order.rungs)}, {step.label}"
            if outcome is None:
                click.echo(f"{head} ...", err=True)
                start = time.monotonic()
            else:
                click.echo(f"{head}: {_said(outcome)}; {time.monotonic() - start:.0f} s in all", err=True)
                ended.append((step, outcome))
    except (InterruptedRungError, KeyboardInterrupt):
        not_run = Outcome(state=RungState.NOT_RUN, reason="interrupted")
        return [*ended, *((step, not_run) for step in order.steps[len(ended) :])], True
    return ended, False


def _said(outcome: Outcome) -> str:
    measured = outcome.measured
    if measured is None:
        return f"{outcome.state}: {outcome.reason}"
    return f"{format_bytes(peak_of(measured))}, {measured.step_time_s:.3g} s a step"


def _predict(
    order: Order, steps: Sequence[Step], gpu: GpuSpec | None, predicted: list[Predicted | None]
) -> bool:
    """Put in what the estimator says of each rung, where it can; return whether Ctrl-C ended the rest."""
    from zerofit.measuring.predict import Predictor

    click.echo("zerofit: predicting ...", err=True)
    predictor = Predictor(model=order.model, gpu=gpu, versions=order.versions)
    for index, step in enumerate(steps):
        try:
            predicted[index] = predictor.predict(step.run)
        except UserError as error:
            click.echo(f"zerofit: no prediction for {step.label}: {error.summary}: {error.found}", err=True)
        except KeyboardInterrupt:
            return True
    return False


def _one_gpu(said: str) -> GpuSpec:
    """Return the GPU of --gpus; more than one is refused, as a rung trains on one."""
    gpus = machine_of_spec(said).machine.gpus
    if len(gpus) > 1:
        raise UserError(
            "ladder-on-one-gpu",
            "a rung trains on one GPU",
            found=f"--gpus {said}",
            why="the ladder is of strategies for a single GPU",
            fix="name one, such as --gpus A100-80G",
        )
    return gpus[0]


@contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """Yield where the processes leave their files: in the user's folder, else in one that goes afterwards.

    The latter stays where a rung was not done, for its log.
    """
    if output is not None:
        logs = output / "rungs"
        try:
            shutil.rmtree(logs, ignore_errors=True)
            logs.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                "not-writable",
                "a folder can't be written",
                found=f"{error.strerror}: {error.filename}",
                why="the folder above it does not allow it",
                fix="name a folder that can be written: --output FOLDER",
            ) from None
        yield logs
        return
    folder = Path(tempfile.mkdtemp(prefix="zerofit-ladder-"))
    try:
        yield folder
    finally:
        is_done = all((folder / f"{log.stem}.json").exists() for log in folder.glob("*.log"))
        shutil.rmtree(folder) if is_done else click.echo(f"zerofit: logs are in {folder}", err=True)


def _write(result: Ladder, *, output: Path | None, plot: Path | None) -> None:
    if output is not None:
        files = {
            output / "ladder.json": ladder_to_json(result),
            output / "ladder.txt": f"{ladder_table(result)}\n",
        }
        write_files(files, force=True, flag="--output FOLDER")
    if plot is not None:
        from zerofit.cli.draw_ladder import draw_ladder
        from zerofit.cli.output.ladder_plot import ladder_plot

        draw_ladder(ladder_plot(result), plot)


def _no_prediction(steps: Sequence[Step]) -> list[Predicted | None]:
    return [None for _ in steps]


def _dry_run(order: Order, *, as_json: bool) -> str:
    """Return the rungs and what each changes."""
    not_run = Outcome(state=RungState.NOT_RUN, reason="--dry-run")
    measured = [(step, not_run) for step in order.steps]
    whole = order.ladder(measured, _no_prediction(order.steps), predicted_for=None)
    if as_json:
        return ladder_to_json(whole).rstrip()
    lines = [head_words(whole), f"on {order.device}, {order.num_steps} timed steps a rung"]
    return "\n".join([*lines, *(f"  {_changed(step)}" for step in order.steps)])


def _changed(step: Step) -> str:
    found = ", ".join(changes(step.before, step.run))
    return f"{step.label}: {found or 'changes nothing'}"
