"""zerofit data: a dataset's lengths, padding waste, and effects of a maximum length."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.completion import complete_file
from zerofit.cli.draw_plot import check_can_plot
from zerofit.cli.output.console import Console, echo, terminal_width
from zerofit.cli.output.data_json import data_json
from zerofit.cli.output.data_table import data_table
from zerofit.cli.parameters import CONTEXT, POSITIVE, TASK, Parsed, Verb, Word, number_option, typed_line
from zerofit.cli.shared_options import capture_limit_option
from zerofit.configs.write.write_files import check_can_write, write_files
from zerofit.core.errors import UserError
from zerofit.data.lengths import LengthHistogram
from zerofit.data.lengths.report import BatchSetup, LengthUnit, MeasuredLengths, length_report
from zerofit.models.task import Task
from zerofit.scripts.capture.limit import check_capture_limit
from zerofit.scripts.target import check_script, script_of, script_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.core.capture import Capture

DEFAULT_BATCH_SIZE = 8
"""TrainingArguments' per_device_train_batch_size (transformers/training_args.py)."""
_FILE_FLAGS = ("tokenizer", "text", "split", "count", "limit", "sample")
"""Flags for files: for a script they follow from the script."""
_INSTEAD = "name the files of its dataset: `zerofit data FILE --tokenizer DIR`"
_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Suffixes of transformers' classes for causal language models."""


def _share(text: str) -> float:
    """Return a percentage as a number up to 1."""
    share = float(text.strip().removesuffix("%")) / 100
    if not text.strip().endswith("%") or not 0 < share <= 1:
        raise ValueError(text)
    return share


_SHARE = Parsed(
    "share",
    _share,
    why="it must be a share of the rows, above 0% and up to 100%",
    fix="write it as in --sample 5%; --limit sets a number of rows",
)


class _DataVerb(Verb):
    """A verb whose flags may follow files, but not a script, to which they would belong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        values, rest = self.peek(ctx, args)
        sources = values.get("sources")
        first = next(iter(sources if isinstance(sources, tuple) else rest), "")
        is_script = bool(values.get("module")) or first.endswith(".py")
        ctx.allow_interspersed_args = not is_script
        return super().parse_args(ctx, args)


@click.command(cls=_DataVerb, context_settings={**CONTEXT, "allow_interspersed_args": False})
@click.option("--tokenizer", metavar="NAME", help="A model's folder, a tokenizer.json, or a cached hub id.")
@click.option(
    "--text",
    metavar="COLUMN[,COLUMN]",
    help="Column to count; two make a pair; default: guessed.",
)
@click.option("--split", metavar="NAME", help="Split of a DatasetDict; default: train.")
@click.option(
    "--count",
    type=Word("count", LengthUnit),
    default=LengthUnit.TOKENS.value,
    show_default=True,
    help="Unit of length; words and characters need no tokenizer.",
)
@click.option("--max-length", type=POSITIVE, help="Truncate samples to this length; default: recommended.")
@number_option(
    "--batch-size", help=f"Samples of one forward pass on one rank; the script's, or {DEFAULT_BATCH_SIZE}."
)
@click.option("--task", type=TASK, help=TASK.listed("Task; causal-lm can pack its samples."))
@click.option("--limit", type=POSITIVE, metavar="ROWS", help="Count the first rows only.")
@click.option("--sample", type=_SHARE, metavar="SHARE", help="Count a random share of the rows: 5%.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON document to a file."
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Plot lengths and padding to a file."
)
@capture_limit_option
@click.option("-m", "--module", is_flag=True, help="SOURCE is a module, as with python -m.")
@click.argument(
    "sources",
    metavar="SOURCE...",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    shell_complete=complete_file,
)
def data(
    sources: tuple[str, ...],
    module: bool,
    capture_limit_s: float,
    max_length: int | None,
    batch_size: int | None,
    task: Task | None,
    as_json: bool,
    output: Path | None,
    force: bool,
    plot: Path | None,
    **flags: Any,
) -> None:
    """Report a dataset's lengths, what padding wastes, and a recommended maximum length.

    SOURCE is a file (csv, tsv, json, jsonl, parquet, arrow, txt), several, a pattern, or a folder of
    save_to_disk, read in pieces whatever its size. Or it is a training script (FILE.py, or -m MODULE)
    followed by its arguments, which runs up to its first training step. Only the files of --output and
    --plot are written.
    """
    is_script = module or sources[0].endswith(".py")
    if plot is not None:
        check_can_plot(plot, force=force)
    if output is not None:
        check_can_write(output, force=force, flag="--output FILE")
    if is_script:
        measured, capture = _of_script(sources, module=module, flags=flags, limit_s=capture_limit_s)
        batch_size = batch_size or capture.micro_batch_size
        is_causal = capture.model.class_path.endswith(_CAUSAL)
    else:
        check_capture_limit(capture_limit_s, because="files")
        measured, is_causal = _of_files(sources, flags), False
    setup = BatchSetup(
        batch_size=batch_size or DEFAULT_BATCH_SIZE,
        is_causal=is_causal if task is None else task is Task.CAUSAL_LM,
        max_length=max_length,
    )
    from zerofit.data.bucketing import simulated_buckets

    buckets = simulated_buckets(measured.histogram, setup.batch_size)
    report = length_report(measured, setup, buckets)
    if plot is not None:
        from zerofit.cli.output.data_plot import draw_lengths

        draw_lengths(report, plot)
    document = data_json(report)
    if output is not None:
        write_files({output: document + "\n"}, force=force, flag="--output FILE")
    echo(document if as_json else data_table(report, width=terminal_width()))


def _of_files(sources: tuple[str, ...], flags: dict[str, Any]) -> MeasuredLengths:
    from zerofit.data.length_counts import measure_files

    text = tuple(name.strip() for name in (flags["text"] or "").split(",") if name.strip())
    if len(text) > 2:
        raise UserError(
            "too-many-columns",
            "a sample has one text, or a pair of texts",
            found=f"--text {flags['text']}",
            why="tokenizers support no more",
            fix="name one or two columns, or join them into one, as for the model",
        )
    with _progress() as on_progress:
        return measure_files(
            sources,
            tokenizer=flags["tokenizer"],
            text=text,
            split=flags["split"],
            unit=flags["count"],
            limit=flags["limit"],
            share=flags["sample"],
            on_progress=on_progress,
        )


def _of_script(
    target: tuple[str, ...], *, module: bool, flags: dict[str, Any], limit_s: float
) -> tuple[MeasuredLengths, Capture]:
    """Return the lengths of the samples that a script trains on, and its capture."""
    from zerofit.scripts.capture.with_progress import captured

    given = [f"--{name}" for name in _FILE_FLAGS if flags[name] not in (None, LengthUnit.TOKENS)]
    if given:
        raise UserError(
            "flag-of-files",
            "a flag for files is given with a script",
            found=f"{', '.join(given)} with {target[0]}",
            why="the script itself determines its samples",
            fix=f"leave out {', '.join(given)}, or name the files of the dataset",
        )
    command = script_target(target[0], target[1:], module=module)
    check_script(command)
    retry = typed_line().with_capture_limit
    with captured(command, limit_s=limit_s, instead=_INSTEAD, retry=retry, observer=Console()) as script:
        capture = script.capture
    lengths = capture.lengths
    if lengths is None or not lengths.counts:
        raise UserError(
            "script-without-lengths",
            "the script's samples have no tokens",
            found=script_of(command),
            why="its first batches have no input_ids or mask to count lengths by",
            fix="name the files of its dataset instead of the script",
        )
    part = "only its first batches were counted: its dataset does not know lengths without reading everything"
    measured = MeasuredLengths(
        subject=script_of(command),
        counted="tokens of its training samples, as it truncates them",
        unit=LengthUnit.TOKENS,
        histogram=LengthHistogram(counts=lengths.counts),
        is_whole=lengths.is_whole,
        notes=() if lengths.is_whole else (part,),
    )
    return measured, capture


@contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """Show a progress bar, only on a terminal and the first rank; yield a function that updates it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    rate_column = TextColumn("{task.fields[rate]}")
    is_shown = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    started, counted = time.monotonic(), 0
    with Progress(
        *(TextColumn("counting"), BarColumn(), TaskProgressColumn(), rate_column, TimeRemainingColumn()),
        console=Console(stderr=True),
        transient=True,
        disable=not is_shown,
    ) as bar:
        task = bar.add_task("", total=None, rate="")

        def show(num_samples: int, bytes_read: int, total_bytes: int) -> None:
            nonlocal counted
            counted = num_samples
            samples_per_s = num_samples / (time.monotonic() - started)
            rate = f"{num_samples:,} samples, {samples_per_s:,.0f}/s"
            bar.update(task, completed=bytes_read, total=total_bytes, rate=rate)

        try:
            yield show
        except KeyboardInterrupt:
            bar.stop()
            words = f"stopped after {counted:,} samples; use --limit or --sample to read a part"
            echo(f"zerofit: {words}", err=True)
            raise
