"""zerofit generate: prompts in, completions out: the whole model on each GPU if it fits, else ZeRO-3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zerofit.cli.completion import complete_file
from zerofit.cli.help_groups import GroupedVerb
from zerofit.cli.options import gpu_ids_option, rendezvous_options
from zerofit.cli.output.console import Console, echo, show_files
from zerofit.cli.parameters import CONTEXT, DTYPE, OFFLOAD, POSITIVE, ZERO_STAGE, Number, Word
from zerofit.cli.shared_options import run_dir_option
from zerofit.generation.generation_job import Gather

_AT_LEAST_0, _PART = Number(float, least=0), Number(float, least=0, most=1)
_FILE = click.Path(path_type=Path, dir_okay=False)
_MOST_SHOWN = 20
"""Prompts shown by a dry run. ASSUMPTION: enough as a sample; thousands would bury the command."""


@click.command(
    cls=GroupedVerb,
    context_settings=CONTEXT,
    groups={
        "Files": ("model", "tokenizer", "prompts", "out", "dry_run"),
        "Completions": (
            "max_new_tokens",
            "generation_config",
            "do_sample",
            "temperature",
            "top_p",
            "num_return_sequences",
            "seed",
            "chat",
        ),
        "Layout": ("batch_size", "dtype", "gather", "zero_stage", "param_offload"),
        "Machine": ("num_processes", "gpu_ids", "gpus", "cpu"),
    },
)
@click.option(
    "--model",
    required=True,
    metavar="DIR",
    shell_complete=complete_file,
    help="Folder of the model, or a cached hub id.",
)
@click.option(
    "--tokenizer",
    metavar="DIR",
    shell_complete=complete_file,
    help="Folder of the tokenizer; default: the model's.",
)
@click.option(
    "--prompts",
    required=True,
    metavar="FILE",
    shell_complete=complete_file,
    help="File of prompts; .txt: a prompt per line. .jsonl: a string per line, or an object with "
    '"prompt" or "messages". '
    "- reads JSONL from standard input.",
)
@click.option(
    "--out",
    required=True,
    metavar="FILE",
    shell_complete=complete_file,
    help="JSONL with the completions; - is standard output, at the end.",
)
@click.option("--max-new-tokens", type=POSITIVE, help="Maximum number of tokens in a completion.")
@click.option("--generation-config", type=_FILE, help="JSON file of transformers' GenerationConfig.")
@click.option("--do-sample/--greedy", default=None, help="Sample tokens; or always take the most likely one.")
@click.option("--temperature", type=_AT_LEAST_0, help="Above 1 is more random; enables sampling.")
@click.option(
    "--top-p", type=_PART, help="Sample from the most likely tokens; those with this total probability."
)
@click.option(
    "--top-k", type=Number(int, least=0), help="Sample from this many of the most likely tokens; 0 is all."
)
@click.option("--num-beams", type=POSITIVE, help="Number of beams.")
@click.option("--num-return-sequences", type=POSITIVE, help="Completions per prompt.")
@click.option(
    "--repetition-penalty",
    type=Number(float, least=0, without_least=True),
    help="Above 1 makes repetition less likely.",
)
@click.option("--seed", type=Number(int, least=0), default=0, show_default=True, help="Random seed.")
@click.option("--chat", is_flag=True, help="Treat plain prompts as messages of a user.")
@click.option("--chat-template", type=_FILE, help="Jinja file to use instead of the tokenizer's template.")
@click.option("--batch-size", type=POSITIVE, help="Prompts in one call on one rank.")
@click.option(
    "--dtype",
    type=DTYPE,
    metavar="[fp32|fp16|bf16]",
    help="Format of the weights; default: the model's own.",
)
@click.option(
    "--gather",
    type=Word("gather", Gather),
    default=Gather.AUTO.value,
    show_default=True,
    help="Gather the weights of ZeRO-3 once; or layer by layer for every token.",
)
@click.option(
    "--zero-stage",
    type=ZERO_STAGE,
    metavar="[0|3]",
    help="0: whole model on each rank, 3: partitioned.",
)
@click.option(
    "--param-offload",
    "--offload-param",
    type=OFFLOAD,
    help="Where ZeRO-3 keeps partitioned weights.",
)
@click.option(
    "--nvme-path",
    metavar="DIR",
    shell_complete=complete_file,
    help="Folder on the NVMe disk, for offload to nvme.",
)
@click.option("--num-processes", type=POSITIVE, help="Ranks on all nodes together; default: one per GPU.")
@click.option("--num-machines", "--nnodes", "num_nodes", type=POSITIVE, help="Number of nodes.")
@rendezvous_options
@gpu_ids_option
@click.option(
    "--gpus",
    metavar="SPEC",
    help="With --dry-run: plan for other GPUs; of another machine, such as 8xA100-80G.",
)
@click.option("--cpu", is_flag=True, help="Generate on the CPU, ignoring GPUs.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
@run_dir_option
@click.option("--dry-run", is_flag=True, help="Print what would be written and run, and load no weights.")
def generate(dry_run: bool, **flags: Any) -> int:
    """Write a completion for each prompt, on whatever this machine has.

    Uses the first layout that fits, by a trace of the model: the whole model on each GPU, ZeRO-3 over all of
    them, or ZeRO-3 with the weights in host memory. Each line of the results is the prompt's line with
    "completions" added, in input order.

    After a kill, the same command does only what is missing; with --out -, the results are kept in the run
    folder until the end: pass that file as --out to resume.

    The exit code is 0 when all is done, 1 if nothing fits or a rank failed, 2 for a mistake in flags or
    files, 128 + N if signal N ended it: 130 after Ctrl-C, 141 if the reader of --out - has gone.
    """
    from zerofit.launching.generate.generate_file import generate_file
    from zerofit.launching.launch import unwritten

    console = Console()
    if dry_run:
        console.say(unwritten("the same line without --dry-run", "generates"))
    generated = generate_file(**flags, dry_run=dry_run, observer=console)
    if dry_run:
        files = generated.files.items()
        show_files({path: _begin_of(text) if path.suffix == ".jsonl" else text for path, text in files})
        echo(generated.command)
    return generated.exit_code


def _begin_of(text: str) -> str:
    """Return prompts, or the first few and the number of others."""
    lines = text.splitlines(keepends=True)
    num_more = len(lines) - _MOST_SHOWN
    return text if num_more <= 0 else "".join(lines[:_MOST_SHOWN]) + f"# and {num_more} more lines\n"
