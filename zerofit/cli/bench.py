"""zerofit bench: measurements on this machine. `ladder` measures one strategy after another."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.cli.completion import complete_gpus, complete_model
from zerofit.cli.draw_plot import check_can_plot
from zerofit.cli.output.console import Console, for_terminal, terminal_width
from zerofit.cli.output.ladder_table import head_words, ladder_table
from zerofit.cli.parameters import CONTEXT, TASK, Verb, Word, number_option
from zerofit.configs.write.write_files import file_exists, not_writable, write_files
from zerofit.core.errors import UserError
from zerofit.core.plan import Topology
from zerofit.core.setting import Said
from zerofit.core.strategy import Engine
from zerofit.core.text_table import wrapped
from zerofit.core.units import format_bytes
from zerofit.machine.machine_spec import machine_of_spec
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import check_libraries, probe_versions
from zerofit.measuring.ladder import (
    CPU,
    DEFAULT_RUNGS,
    PUBLISHED_BATCH,
    PUBLISHED_LENGTH,
    PUBLISHED_MODEL,
    baseline,
    changes,
    climb,
    ladder_to_json,
    make_ladder,
    measure_rungs,
    parse_rungs,
    rung_names,
)
from zerofit.measuring.results import TrialOutcome, TrialSpec, TrialState, peak_of
from zerofit.models.dimensions import check_sequence_length
from zerofit.models.find import probe_model
from zerofit.models.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.core.facts import GpuSpec, ModelFacts, Versions
    from zerofit.measuring.ladder import Ladder, LadderStep
    from zerofit.measuring.predict import Predictor
    from zerofit.measuring.results import TrialPrediction
    from zerofit.models.source import ModelSource

_CPU_MODEL = "all-minilm-l6-v2"
"""A BERT of 23 M parameters, whose activations at the default sizes are a GiB or more, and weights, gradients
and states a tenth of that each, so that every rung has a visible effect."""
_CPU_STEPS, _GPU_STEPS = 2, 10
"""ASSUMPTION: on the CPU memory matters most; on a GPU steps are short."""
_LIMIT_S = 1800
"""ASSUMPTION: no rung takes half an hour for a model worth measuring; --rung-limit changes it."""
_INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 + SIGINT."""


_NEEDS_ZERO_FIX = "put zero-1, zero-2 or zero-3 before {rung}, and leave --alone out; or leave {rung} out"
_FIXES = {
    "zero-needs-deepspeed": _NEEDS_ZERO_FIX,
    "optimizer-offload-needs-zero": _NEEDS_ZERO_FIX,
    "param-offload-needs-zero3": "put zero-3 before offload-param, or leave offload-param out",
    "offload-needs-adam": "leave out the rung of another optimizer, or offload-optimizer",
    "fp16-needs-gpu": "leave fp16 out, name bf16 in its place, or measure on a GPU",
}
"""The fix for a violated rule in terms of rungs: a rule's own fix names settings of other verbs."""
_OTHER_FIX = "leave {rung} out, or the rung that it conflicts with"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure on this machine what zerofit predicts."""


@bench.command(
    cls=Verb, context_settings=CONTEXT, epilog=f"Rungs: {', '.join(rung_names())}; N is any number."
)
@click.option(
    "--model",
    metavar="NAME|FOLDER|FILE",
    shell_complete=complete_model,
    help=f"A model's config; weights are random. By default {PUBLISHED_MODEL}, on the CPU {_CPU_MODEL}.",
)
@click.option("--task", type=TASK, help=TASK.listed("Task of the model's head."))
@click.option("--rungs", default=DEFAULT_RUNGS, show_default=True, help="Rungs, in the order of the ladder.")
@click.option("--alone", is_flag=True, help="Add each rung to the baseline, not to those before it.")
@number_option(
    "--batch-size",
    default=PUBLISHED_BATCH,
    help="Samples per optimizer step on the measured rank.",
)
@number_option("--seq-len", "sequence_length", default=PUBLISHED_LENGTH, help="Tokens per sample.")
@click.option(
    "--attention",
    type=Word("attention", {name: name for name in ("eager", "sdpa")}),
    default="eager",
    show_default=True,
    help="transformers' attention of the baseline; eager as in the published ladder.",
)
@number_option(
    "--ranks",
    "num_ranks",
    default=1,
    help="Under ZeRO, run as rank 0 of N, with collectives that exchange nothing.",
)
@number_option(
    "--steps",
    "num_steps",
    help=f"Steps that are timed, after the warm-up; by default {_GPU_STEPS}, on the CPU {_CPU_STEPS}.",
)
@click.option("--cpu", "on_cpu", is_flag=True, help="Measure on the CPU.")
@click.option(
    "--gpus",
    metavar="SPEC",
    shell_complete=complete_gpus,
    help="Predict for this GPU, such as A100-80G, instead of this machine's.",
)
@number_option(
    "--rung-limit",
    "limit_s",
    metavar="SECONDS",
    kind=float,
    default=_LIMIT_S,
    help="Time limit of one rung.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the tables.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Plot memory and time to a file."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write ladder.json, ladder.txt and each rung's log to a folder.",
)
@click.option("--force", is_flag=True, help="Overwrite a ladder in that folder, or a plot.")
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

    Each rung trains the same model with random weights on the same batch, in a fresh process: first some
    steps without dropout, for comparable losses, then the timed ones. A rung that can't run here, or runs
    out of memory, says so, and the others continue. Exits 1 if none ran.
    """
    named, is_cumulative = parse_rungs(rungs), not alone
    base = baseline(
        batch_size=batch_size, sequence_length=sequence_length, attention=attention, num_ranks=num_ranks
    )
    steps = climb(named, base, is_cumulative=is_cumulative)
    if plot is not None:
        check_can_plot(plot, force=force)
    if output is not None and not force and (output / "ladder.json").exists():
        raise file_exists(str(output / "ladder.json"), flag="--output FOLDER")
    check_libraries(Console())
    here = () if on_cpu else probe_machine().gpus
    source = _text_model(model or (PUBLISHED_MODEL if here else _CPU_MODEL), task)
    check_sequence_length(source.facts, sequence_length)
    versions = probe_versions()
    check_steps(steps, source.facts, num_ranks=num_ranks, on_cpu=not here, versions=versions)
    gpu = _one_gpu(gpus) if gpus else next(iter(here), None)
    template = TrialSpec(
        model=model or source.name,
        task=source.task.value,
        strategy=base.strategy,
        sequence_length=sequence_length,
        full_length=sequence_length,
        num_steps=num_steps or (_GPU_STEPS if here else _CPU_STEPS),
        on_cpu=not here,
    )
    measured: list[tuple[LadderStep, TrialOutcome]] = []
    predicted: list[TrialPrediction | None] = []
    reason = "--dry-run"
    try:
        if not dry_run:
            with _folder(output) as folder:
                ended = measure_rungs(
                    named, base, template, is_cumulative=is_cumulative, folder=folder, limit_s=limit_s
                )
                _measure(ended, len(steps), measured)
            from zerofit.measuring.predict import Predictor

            _predict(Predictor(model=source, gpu=gpu, versions=versions), measured, predicted)
    except KeyboardInterrupt:
        reason = "interrupted"
    is_interrupted = not dry_run and len(predicted) < len(steps)
    not_run = TrialOutcome(state=TrialState.NOT_RUN, reason=reason)
    measured += [(step, not_run) for step in steps[len(measured) :]]
    predicted += [None] * (len(steps) - len(predicted))
    result = make_ladder(
        source,
        base,
        measured,
        predicted,
        predicted_for=gpu.name if gpu and not dry_run else None,
        device=here[0].name if here else CPU,
        is_cumulative=is_cumulative,
        versions=versions,
    )
    table = _dry_run(result, steps, template) if dry_run else ladder_table(result, width=terminal_width())
    click.echo(ladder_to_json(result).rstrip() if as_json else table)
    if dry_run:
        return 0
    _write(result, output=output, plot=plot)
    if is_interrupted:
        return _INTERRUPTED
    return 0 if any(outcome.measured for _, outcome in measured) else 1


def _text_model(said: str, task: Task | None) -> ModelSource:
    """Return the model; one that reads no tokens is refused."""
    source = probe_model(said, task=task)
    inputs = {
        Task.IMAGE_CLASSIFICATION: "pixel_values, labels",
        Task.SPEECH_SEQ2SEQ: "input_features, labels",
    }.get(source.task)
    if inputs is not None:
        raise UserError(
            "ladder-needs-tokens",
            "the ladder only supports models with tokens",
            found=f"--model {said}, whose inputs are {inputs}",
            why="its rungs and results are based on tokens",
            fix="name a text model",
        )
    return source


def _measure(
    rungs: Iterator[tuple[LadderStep, TrialOutcome | None]],
    num_rungs: int,
    measured: list[tuple[LadderStep, TrialOutcome]],
) -> None:
    """Run the rungs, and append their outcomes to `measured`."""
    start = time.monotonic()
    for step, outcome in rungs:
        head = f"zerofit: rung {len(measured) + 1} of {num_rungs}, {step.label}"
        if outcome is None:
            click.echo(f"{head} ...", err=True)
            start = time.monotonic()
        else:
            said = f"{head}: {_outcome_words(outcome)}; {time.monotonic() - start:.0f} s in total"
            click.echo(for_terminal(said), err=True)
            measured.append((step, outcome))


def _outcome_words(outcome: TrialOutcome) -> str:
    measured = outcome.measured
    if measured is None:
        return f"{outcome.state}: {outcome.reason}"
    return f"{format_bytes(peak_of(measured))}, {measured.step_time_s:.3g} s a step"


def _predict(
    predictor: Predictor,
    measured: Sequence[tuple[LadderStep, TrialOutcome]],
    predicted: list[TrialPrediction | None],
) -> None:
    """Append the prediction of each rung to `predicted`; None if there is none."""
    click.echo("zerofit: predicting ...", err=True)
    for step, _ in measured:
        try:
            predicted.append(predictor.predict(step.run))
        except UserError as error:
            predicted.append(None)
            click.echo(f"zerofit: no prediction for {step.label}: {error.summary}: {error.found}", err=True)


def _one_gpu(said: str) -> GpuSpec:
    """Return the GPU of --gpus; several are refused, since a rung trains on one."""
    gpus = machine_of_spec(said).machine.gpus
    if len(gpus) > 1:
        raise UserError(
            "ladder-on-one-gpu",
            "a rung trains on one GPU",
            found=f"--gpus {said}",
            why="the ladder compares strategies for a single GPU",
            fix="name one, such as --gpus A100-80G",
        )
    return gpus[0]


@contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """Yield the folder for the processes' files: inside the user's, else a temporary one.

    A temporary folder is kept for its log if a rung did not end by itself.
    """
    if output is not None:
        logs = output / "rungs"
        try:
            shutil.rmtree(logs, ignore_errors=True)
            logs.mkdir(parents=True)
        except OSError as error:
            found = f"{error.strerror}: {error.filename}"
            raise not_writable(found, flag="--output FOLDER", what="folder") from None
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
        from zerofit.cli.output.ladder_plot import draw_ladder

        draw_ladder(result, plot)


def _dry_run(whole: Ladder, steps: Sequence[LadderStep], template: TrialSpec) -> str:
    """Return the rungs and the change of each."""
    lines = [*wrapped([head_words(whole)], terminal_width())]
    lines.append(f"on {whole.device}, {template.num_steps} timed steps per rung")
    for step in steps:
        changed = ", ".join(changes(step.before, step.run))
        lines.append(f"  {step.label}: {changed or 'changes nothing'}")
    return "\n".join(lines)


def check_steps(
    steps: Sequence[LadderStep], facts: ModelFacts, *, num_ranks: int, on_cpu: bool, versions: Versions
) -> None:
    """Check all rungs of a ladder before any of them runs.

    DeepSpeed rungs, and those with offload, are checked by the rules of `zerofit check`. Missing requirements
    of other rungs are reported by their processes, and the ladder continues.

    Args:
        steps: each rung with its settings.
        facts: of the model.
        num_ranks: of --ranks.
        on_cpu: whether they run on the CPU.
        versions: the installed versions.

    Raises:
        UserError: the model has too few positions for a rung, or one has no ranks.
        ExceptionGroup: of one UserError for each violated rule of the first such rung.
    """
    topology = Topology(world_size=num_ranks, on_cpu=on_cpu)
    own_optimizer: Said[str | None] = Said(value="torch.AdamW", text="the ladder's AdamW")
    for step in steps:
        rung, strategy = step.rung.name, step.run.strategy
        is_plain = strategy.engine is not Engine.DEEPSPEED
        trains = "which trains in plain PyTorch" if is_plain else f"under ZeRO-{strategy.zero_stage.value}"
        _check_length(facts, step)
        if not is_plain or strategy.offloads:
            situation = situation_of_strategy(
                strategy, topology=topology, versions=versions, own_optimizer=own_optimizer
            )
            broken = [
                UserError(
                    one.rule,
                    one.summary,
                    found=f"--rungs with {rung}, {trains}",
                    why=one.why,
                    fix=_FIXES.get(one.rule, _OTHER_FIX).format(rung=rung),
                    see=one.see,
                )
                for one in check(situation, rules=ALL_RULES).of(Severity.ERROR)
            ]
            if broken:
                raise ExceptionGroup("rungs that don't work", broken)
        if num_ranks > 1 and is_plain:
            raise UserError(
                "ladder-ranks-need-zero",
                "a rung with several ranks needs ZeRO",
                found=f"--ranks {num_ranks} and --rungs with {rung}, {trains}",
                why="with simulated collectives, only DeepSpeed uses the memory of rank 0 of many",
                fix="start with zero-1, zero-2 or zero-3, and leave baseline out; or leave --ranks out",
            )


def _check_length(facts: ModelFacts, step: LadderStep) -> None:
    """Check that the model has positions for a rung's samples; the error names the rung."""
    try:
        check_sequence_length(facts, step.run.sequence_length)
    except UserError as error:
        raise UserError(
            error.rule,
            error.summary,
            found=f"--rungs with {step.rung.name} and the model {facts.name}",
            why=error.why,
            fix=f"name length-{facts.max_sequence_length} or less",
        ) from None
