"""Flags for a strategy and its ranks, and the settings they give."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.checking.launch_line import read_line
from zerofit.cli.adapter_options import ADAPTER_FLAGS, ADAPTER_OPTIONS, adapter_settings
from zerofit.cli.completion import complete_file, complete_script, complete_words
from zerofit.cli.output.console import Console
from zerofit.cli.parameters import (
    OFFLOAD,
    POSITIVE,
    ZERO_STAGE,
    Number,
    Word,
    listed,
    number_option,
    option_group,
    typed_line,
    typed_words,
)
from zerofit.cli.shared_options import run_dir_option, wide_option
from zerofit.core.presets import PRESETS
from zerofit.core.strategy import Engine, OptimizerName, Precision, StateDictType
from zerofit.launching.misplaced_flags import check_misplaced_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PRECISIONS = {"no": Precision.FP32, "fp32": Precision.FP32, "fp16": Precision.FP16, "bf16": Precision.BF16}
_PRECISION = Word("precision", _PRECISIONS)
_STATE_DICTS = {kind.name.lower(): kind for kind in StateDictType} | {
    kind.value.lower().replace("_", "-"): kind for kind in StateDictType
}
"""Short words, and accelerate's own."""
_OPTIMIZER = Word("optimizer", OptimizerName)
_ATTENTIONS = {
    name.replace("_", "-"): name
    for name in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
}
"""transformers/modeling_utils.py, attn_implementation."""
_ATTENTION = Word("attention", _ATTENTIONS)

_START_OPTIONS = (
    click.option(
        "--preset",
        metavar="NAME",
        shell_complete=complete_words(preset.name for preset in PRESETS),
        help=f"Start from a preset; one of {', '.join(p.name for p in PRESETS)}.",
    ),
    click.option("--plan", type=click.Path(path_type=Path), help="Start from a plan file."),
)
_FIELD_OPTIONS = (
    click.option("--engine", type=Word("engine", Engine), help="DeepSpeed, FSDP2, or native: PyTorch alone."),
    click.option(
        "--zero-stage",
        type=ZERO_STAGE,
        help="ZeRO stage: the states that DeepSpeed shards.",
    ),
    click.option(
        "--offload-optimizer",
        "--offload-optimizer-device",
        "optimizer_offload",
        type=OFFLOAD,
        help=f"Optimizer states on: {listed(OFFLOAD)}.",
    ),
    click.option(
        "--offload-param",
        "--offload-param-device",
        "param_offload",
        type=OFFLOAD,
        help=f"Weights (ZeRO-3, FSDP2) on: {listed(OFFLOAD)}.",
    ),
    click.option(
        "--nvme-path",
        metavar="DIR",
        shell_complete=complete_file,
        help="Folder on the NVMe disk, for offload to nvme.",
    ),
    click.option(
        "--reshard-after-forward/--no-reshard-after-forward",
        default=None,
        help="FSDP2: free gathered weights after the forward pass; --no-... keeps them, as ZeRO-2 does.",
    ),
    click.option(
        "--state-dict-type",
        type=Word("state-dict-type", _STATE_DICTS),
        help="FSDP2: checkpoints as whole weights on rank 0, or as shards of each rank.",
    ),
    number_option(
        "--dp-replicate-size",
        "--parallelism-config-dp-replicate-size",
        help="FSDP2: copies of the sharded weights (hybrid sharding); 1 shards over all ranks.",
    ),
    click.option(
        "--mixed-precision",
        "precision",
        type=_PRECISION,
        help="Compute in fp32 (or no), fp16 or bf16.",
    ),
    click.option("--micro-batch-size", type=POSITIVE, help="Samples per rank in one forward pass."),
    click.option(
        "--gradient-accumulation-steps", type=POSITIVE, help="Passes of each rank per optimizer step."
    ),
    number_option("--global-batch-size", "--global-batch", help="Samples per optimizer step over all ranks."),
    click.option("--gradient-clipping", type=Number(float, least=0), help="Maximum gradient norm; 0 is off."),
    click.option(
        "--gradient-checkpointing/--no-gradient-checkpointing", default=None, help="Recompute activations."
    ),
    number_option(
        "--checkpoint-every",
        help="Recompute the activations of every Nth block: 1 is every block.",
    ),
    click.option(
        "--offload-activations",
        "activation_offload",
        is_flag=True,
        default=None,
        help="Recompute activations from inputs stored in host memory.",
    ),
    click.option("--optimizer", type=_OPTIMIZER, help=_OPTIMIZER.listed("The optimizer to train with.")),
    click.option(
        "--attention", type=_ATTENTION, help=_ATTENTION.listed("transformers' attention implementation.")
    ),
    click.option("--compile", is_flag=True, default=None, help="Use torch.compile."),
    *ADAPTER_OPTIONS,
    click.option(
        "--tf32/--no-tf32",
        default=None,
        hidden=True,
        help="Use tf32 for fp32 products on tensor cores.",
    ),
    click.option("--liger", is_flag=True, default=None, help="Use Liger kernels in the model."),
    click.option("--group-by-length", is_flag=True, default=None, help="Batch samples of similar length."),
    number_option(
        "--tensor-parallel-size",
        "--tp-size",
        "--parallelism-config-tp-size",
        help="Ranks that share each layer of one copy of the model and get the same samples.",
    ),
    click.option(
        "--sequence-parallel-size",
        "--sp-size",
        "--parallelism-config-sp-size",
        type=POSITIVE,
        help="Ranks that share the tokens of each sample, for long sequences (Ulysses).",
    ),
    click.option(
        "--pipeline-parallel-size",
        "--pp-size",
        type=POSITIVE,
        help="Ranks that share the blocks of the model, and pass activations on.",
    ),
    click.option(
        "--pipeline-stages-per-rank",
        type=POSITIVE,
        help="Stages that each rank of a pipeline holds (interleaved 1F1B): less waiting, more memory.",
    ),
)
num_processes_option = click.option(
    "--num-processes", type=POSITIVE, help="Ranks on all nodes together; default: one per GPU."
)
_cpu_option = click.option("--cpu", "on_cpu", is_flag=True, help="Run on the CPU as a test, ignoring GPUs.")
num_nodes_option = click.option(
    "--num-machines", "--nnodes", "num_nodes", type=POSITIVE, help="Number of nodes."
)
rendezvous_options = option_group(
    click.option(
        "--machine-rank",
        "--node-rank",
        type=Number(int, least=0),
        hidden=True,
        help="This node's number, from 0.",
    ),
    click.option(
        "--main-process-ip", "--master-addr", metavar="HOST", hidden=True, help="Address of node 0."
    ),
    click.option(
        "--main-process-port",
        "--master-port",
        type=Number(int, least=0, most=65535),
        help="Port on node 0; 0 picks a free one.",
    ),
)
"""The flags for the rendezvous of nodes."""

no_check_option = click.option(
    "--no-check",
    is_flag=True,
    hidden=True,
    help="Continue even if `zerofit check` says that it can't work.",
)
trust_option = click.option(
    "--trust-checkpoint",
    "trusts_checkpoint",
    is_flag=True,
    help="Load a checkpoint even if its files run code; only for one that you or your script wrote.",
)
module_option = click.option(
    "-m", "--module", is_flag=True, hidden=True, help="SCRIPT is a module, as with python -m."
)
gpu_ids_option = click.option("--gpu-ids", metavar="IDS", help="GPUs of this node to use, such as 0,2.")


def script_options(
    *, dry_run: str, has_quiet: bool = True, verbose: str = "Print everything: the capture, the plan's table."
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that adds SCRIPT with its arguments, and the flags of its run.

    The command gets `console` from --quiet, --verbose and --wide, and `is_checked` from --no-check.

    Args:
        dry_run: the help of --dry-run.
        has_quiet: False to leave out --quiet.
        verbose: the help of --verbose.
    """
    quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only errors.")

    def add(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def run(*, verbose: bool, wide: bool, no_check: bool, quiet: bool = False, **flags: Any) -> int:
            console = Console(is_quiet=quiet, shows_details=verbose, is_wide=wide)
            return command(console=console, is_checked=not no_check, **flags)

        return option_group(
            module_option,
            run_dir_option,
            no_check_option,
            click.option("--dry-run", is_flag=True, help=dry_run),
            *((quiet_option,) if has_quiet else ()),
            click.option("-v", "--verbose", is_flag=True, help=verbose),
            wide_option,
            click.argument("script", shell_complete=complete_script),
            click.argument("script_args", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_file),
        )(run)

    return add


strategy_options = option_group(
    *_START_OPTIONS, *_FIELD_OPTIONS, num_processes_option, num_nodes_option, _cpu_option
)
"""The flags for a strategy and its ranks."""
one_node_options = option_group(*_FIELD_OPTIONS, num_processes_option, _cpu_option)
"""The flags for a strategy's fields and the ranks of one node."""
field_options = option_group(*_FIELD_OPTIONS)
"""The flags for a strategy's fields only."""


def settings_from(flags: dict[str, Any]) -> dict[str, Any]:
    """Return flags, by parameter names, as keyword arguments of a verb's function.

    Raises:
        UserError: flags contradict each other.
    """
    settings = {**flags, **adapter_settings(flags), "typed": typed_line()}
    return {name: value for name, value in settings.items() if name not in ADAPTER_FLAGS}


def check_script_flags(script: str, script_args: Sequence[str]) -> None:
    """Check that no flag of the running verb follows a script that does not know it."""
    line = None if click.get_current_context().params.get("module") else read_line((script, *script_args))
    options = [
        param for param in click.get_current_context().command.params if isinstance(param, click.Option)
    ]
    before = typed_words()[0]
    if line is not None:
        script, *script_args = line.target
        of_line = line.words_of(option.name for option in options if option.name is not None)
        before = (*before[:2], *of_line, *before[2:])
    flags = {
        name: not option.is_flag
        for option in options
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("--")
    }
    check_misplaced_flags((script, *script_args), before=before, flags=flags)
