"""zerofit export: a checkpoint's weights in the format of from_pretrained()."""

from __future__ import annotations

from pathlib import Path

import click

from zerofit.cli.options import trust_option
from zerofit.cli.output.console import echo
from zerofit.cli.parameters import CONTEXT, Verb
from zerofit.core.units import format_bytes
from zerofit.launching.export import export as export_weights


@click.command(cls=Verb, context_settings=CONTEXT)
@click.argument("source", metavar="RUN_OR_CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--out", required=True, metavar="DIR", type=click.Path(path_type=Path), help="A new folder.")
@trust_option
def export(*, source: Path, out: Path, trusts_checkpoint: bool) -> None:
    """Write the weights of a checkpoint as from_pretrained() reads them.

    RUN_OR_CHECKPOINT is a checkpoint of accelerate or Trainer, a folder of them, or the folder of a run: its
    newest complete checkpoint. Weights of any ZeRO stage are gathered; adapters are written as peft reads
    them. The result is loaded and compared bit by bit.
    """
    exported = export_weights(source, out, trusts_checkpoint=trusts_checkpoint)
    what = "adapters" if exported.is_adapter else "weights"
    echo(f"zerofit: {what} of {exported.checkpoint}, loaded and compared", err=True)
    echo(f"{exported.folder}: {exported.num_parameters} numbers, {format_bytes(exported.total_bytes)}")
