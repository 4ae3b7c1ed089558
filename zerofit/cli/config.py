"""zerofit config: a strategy as files for accelerate, DeepSpeed and Trainer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.checking.check_run import check, stop_at_errors, stop_at_findings
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.cli.completion import complete_file
from zerofit.cli.help_groups import GroupedVerb
from zerofit.cli.options import no_check_option, settings_from, strategy_options
from zerofit.cli.output.console import Console, echo, show_files
from zerofit.cli.parameters import CONTEXT
from zerofit.cli.plan_options import machine_options, model_options
from zerofit.configs.write.accelerate import accelerate_yaml, fsdp_recomputes
from zerofit.configs.write.command import (
    Rendezvous,
    accelerate_launch_arguments,
    compile_environment,
    launch_environment,
    needs_one_gpu,
    shell_command,
)
from zerofit.configs.write.deepspeed import deepspeed_json
from zerofit.configs.write.trainer import takes_every_n_layers, takes_offload, training_arguments_json
from zerofit.configs.write.write_files import write_files
from zerofit.core.command import Launcher
from zerofit.core.overrides import FLAGS
from zerofit.core.plan import plan_lines
from zerofit.core.setting import Place, Said
from zerofit.core.strategy import Engine, Precision
from zerofit.machine.machine_spec import SpecifiedMachine
from zerofit.machine.port import DEFAULT_PORT
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import probe_versions
from zerofit.planning.machine_from_flags import machine_of
from zerofit.planning.plan_from_flags import choose, with_explicit_numbers
from zerofit.planning.resolve import Verb, resolve
from zerofit.planning.sources.settings import check_none_ignored

if TYPE_CHECKING:
    from zerofit.checking.engine import Verdict
    from zerofit.core.plan import Plan
    from zerofit.planning.run_spec import RunSpec


@click.command(
    cls=GroupedVerb,
    context_settings=CONTEXT,
    groups={"Files": ("source", "output_dir", "auto", "force", "dry_run")},
)
@strategy_options
@model_options
@machine_options()
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder for the files; default: the current one.",
)
@click.option(
    "--from",
    "source",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    shell_complete=complete_file,
    help="Import an accelerate (YAML) or DeepSpeed (JSON) file.",
)
@click.option("--auto", is_flag=True, help='Write "auto" for what the script decides; instead of numbers.')
@no_check_option
@click.option("--force", is_flag=True, help="Overwrite files that differ.")
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
def config(
    output_dir: Path, source: str | None, auto: bool, no_check: bool, force: bool, dry_run: bool, **flags: Any
) -> int:
    """Write the files of a memory strategy.

    ds_config.json for DeepSpeed, accelerate.yaml and launch.sh for accelerate, training_args.json for
    Trainer. DeepSpeed's numbers are explicit: by default 1 for micro-batch and accumulation, and no clipping.
    For another machine than this one, set --num-processes to its number of GPUs.
    """
    console = Console()
    is_deepspeed = source is not None and source.endswith(".json")
    spec = resolve(
        None,
        verb=Verb.CONFIG,
        config_file=None if is_deepspeed else source,
        deepspeed_file=source if is_deepspeed else None,
        observer=console,
        **settings_from(flags),
    )
    if source is not None:
        report = check(source, num_processes=spec.overrides.get("world_size"), on_cpu=spec.on_cpu)
        stop_at_findings(_of_engine(report.verdict, spec), no_check=no_check, say=console.show)
    by_script = () if spec.files is None else spec.files.by_script
    if spec.files is not None and not spec.overrides.has("precision"):
        # as accelerate and DeepSpeed take such a file
        place = Place(file=f"{source}, which names no precision,", line=0)
        precision = Said(value=Precision.FP32, text="mixed_precision=no", place=place)
        spec = spec.setting(precision=precision)
    if by_script and not auto:
        console.say(f'{", ".join(by_script)} of {source}: "auto" stays')
    plan = _plan(spec, console)
    situation = situation_of_strategy(
        plan.strategy,
        topology=plan.topology,
        versions=plan.versions,
        launcher=Launcher.ACCELERATE,
        typed=plan.typed_fields,
        said=spec.overrides,
    )
    stop_at_errors(situation, no_check=no_check, say=console.show)
    plan = plan if auto else with_explicit_numbers(plan, but_for=by_script)
    files = _files(plan, output_dir, auto=auto)
    if dry_run:
        show_files(files)
        return 0
    write_files(files, force=force)
    for line in (*plan_lines(plan), *_other_batch(spec, plan), *_left_out(plan), *_needed_by_groups(plan)):
        console.say(line)
    for path in files:
        echo(str(path))
    return 0


_ONLY_IN_DEEPSPEED = "deepspeed-key-removed"
"""The rule of keys that DeepSpeed refuses, and that files for another engine leave out."""


def _of_engine(verdict: Verdict, spec: RunSpec) -> Verdict:
    """Return the findings that matter to the engine that the files are for."""
    if spec.overrides.get("engine") in (None, Engine.DEEPSPEED):
        return verdict
    return replace(
        verdict, findings=tuple(found for found in verdict.findings if found.rule != _ONLY_IN_DEEPSPEED)
    )


def _plan(spec: RunSpec, console: Console) -> Plan:
    """Return the plan that the files are for: made for --model, or what the flags say."""
    is_named = spec.options.model is not None
    if not is_named:
        check_none_ignored(
            spec.options, because="no --model", instead="name the model to plan for: --model MODEL"
        )
    else:
        from zerofit.planning.plan import check_none_missing  # imported only if needed

        check_none_missing(spec, needs_batch=False)
    if is_named or not spec.is_here:
        num_nodes = spec.overrides.get("num_nodes") or 1
        spec = replace(spec, machine=machine_of(spec.described, num_nodes=num_nodes))
    else:  # the files are for GPUs that can't be verified
        node = probe_machine(may_be_unreadable=True)
        spec = replace(spec, machine=SpecifiedMachine(machine=node, assumptions=()))
    assert spec.machine is not None
    if not is_named:
        machine = spec.machine.machine
        return choose(machine=machine, versions=probe_versions(), spec=spec, has_these_gpus=False)
    # imported only if needed: it loads many modules
    from zerofit.planning.plan import check_plans_alone, plan_to_run, ranks_to_plan
    from zerofit.planning.subject import describe

    check_plans_alone(spec, on_cpu=spec.on_cpu, rehearses=False)
    if not spec.is_here:
        ranks_to_plan(spec)
    named = describe(spec.options, versions=probe_versions())
    plan, *_ = plan_to_run(spec, named, observer=console)
    return plan


def _files(plan: Plan, folder: Path, *, auto: bool) -> dict[Path, str]:
    strategy = plan.strategy
    if auto and plan.is_default("precision"):
        strategy = replace(strategy, precision=None)
    deepspeed = folder / "ds_config.json" if strategy.engine is Engine.DEEPSPEED else None
    accelerate = folder / "accelerate.yaml"
    deepspeed_file = str(deepspeed) if deepspeed else None
    files = {
        accelerate: accelerate_yaml(
            strategy,
            topology=plan.topology,
            deepspeed_file=deepspeed_file,
            is_used_alone=True,
            accelerate=plan.versions.accelerate,
        ),
        folder / "training_args.json": training_arguments_json(
            strategy,
            deepspeed_file=deepspeed_file,
            transformers=plan.versions.transformers,
            accelerate=plan.versions.accelerate,
            is_used_alone=True,
        ),
        folder / "launch.sh": _launch_script(plan, accelerate),
    }
    if deepspeed:
        files[deepspeed] = deepspeed_json(strategy, trains=plan.trains, topology=plan.topology)
    return files


def _other_batch(spec: RunSpec, plan: Plan) -> list[str]:
    """Return a line if the imported file names another global batch than the files that are written."""
    said = None if spec.files is None else spec.files.batch.get("global_batch_size")
    strategy, ranks = plan.strategy, plan.topology.data_parallel_size
    size, steps = strategy.micro_batch_size, strategy.gradient_accumulation_steps
    if said is None or size is None or said.value == (made := strategy.samples_per_step * ranks):
        return []
    parts = f"{size} x {steps or 1} x {ranks} rank{'s' * (ranks > 1)} = {made}"
    return [f"{said.text} ({said.where}) is left out: micro-batch x accumulation x ranks decide it, {parts}"]


_IN_NO_FILE = ("freeze", "lora", "quantization", "attention")
"""Settings made in the script, by itself or by `zerofit launch`: no configuration file has them."""


def _left_out(plan: Plan) -> list[str]:
    """Return a line with the settings that no file has."""
    names = [name for name in _IN_NO_FILE if getattr(plan.strategy, name)]
    transformers = plan.versions.transformers
    if plan.strategy.checkpoint_every > 1 and transformers and not takes_every_n_layers(transformers):
        names.append("checkpoint_every")
    by_accelerate = plan.strategy.engine is Engine.FSDP2 and fsdp_recomputes(
        plan.strategy, accelerate=plan.versions.accelerate
    )
    is_taken = by_accelerate or not transformers or takes_offload(transformers)
    if plan.strategy.activation_offload and not is_taken:
        names.append("activation_offload")
    flags = [FLAGS[name] for name in names]
    if not flags:
        return []
    return [
        f"no file has {', '.join(flags)}: use `zerofit launch` with the same flags, or "
        "zerofit.apply('plan.json') in the script, with the plan of `zerofit plan --output plan.json`"
    ]


def _needed_by_groups(plan: Plan) -> list[str]:
    """Return a line with what groups of ranks need that no file says."""
    if plan.topology.pipeline_parallel_size > 1:
        return [
            "no file says that ranks are stages of a pipeline, and with these each trains the whole model: "
            "use `zerofit launch` with the same flags"
        ]
    if plan.topology.sequence_parallel_size == 1:
        return []
    return [
        "with these files accelerate splits the batches: they need position_ids, no padding and a length "
        "that "
        f"{plan.topology.sequence_parallel_size} divides, and a custom loop needs its own loss over "
        "shift_labels; `zerofit launch` needs none of that"
    ]


_ONE_GPU = """\
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES%%,*}"   # one rank, one GPU
"""


def _launch_script(plan: Plan, accelerate: Path) -> str:
    several = plan.topology.num_nodes > 1
    arguments = accelerate_launch_arguments(
        plan,
        config_file=str(accelerate),
        rendezvous=Rendezvous(
            main_process_ip="MASTER_ADDR" if several else None, main_process_port=DEFAULT_PORT
        ),
        target=(),
    )
    # For GPUs the file may be used on another machine, whose cores are unknown.
    on_cpu = plan.topology.on_cpu
    environment = launch_environment(plan, inherited=os.environ) if on_cpu else compile_environment(plan)
    command = shell_command(arguments, environment=environment)
    # The target machine may have more GPUs, which Trainer would all use for its single rank.
    one_gpu = _ONE_GPU if needs_one_gpu(plan) else ""
    usage = f"{accelerate.parent / 'launch.sh'} train.py ARGS"
    if several:  # each node sets its own number
        command = command.replace("--machine_rank 0", '--machine_rank "$NODE_RANK"')
        command = command.replace("MASTER_ADDR", '"$MASTER_ADDR"')
        usage = f"NODE_RANK=0 MASTER_ADDR=node0 {usage}   # on every node, with its own number"
    return f'#!/usr/bin/env bash\n# usage: {usage}\nset -eu\n{one_gpu}{command} "$@"\n'
