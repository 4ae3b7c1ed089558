"""Flags to problems: the model or the capture, the machine, and what no plan can be made for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.batch import split_global_batch
from zerofit.core.command import Route
from zerofit.core.errors import UserError
from zerofit.core.facts import Workload
from zerofit.core.plan import Topology
from zerofit.core.strategy import DTYPES, Precision
from zerofit.core.supported import release_of
from zerofit.machine.machine_spec import SpecifiedMachine, machine_of_spec
from zerofit.machine.this_node import probe_machine
from zerofit.models.dimensions import check_sequence_length
from zerofit.models.find import probe_model
from zerofit.models.task import Task
from zerofit.planning.inputs import Loop
from zerofit.planning.problem import Problem
from zerofit.scripts.facts import ModelConstructor
from zerofit.scripts.target import put_before

if TYPE_CHECKING:
    from zerofit.core.capture import Capture
    from zerofit.core.facts import Machine, ModelFacts, Versions
    from zerofit.core.request import Request
    from zerofit.models.source import ModelSource
    from zerofit.planning.inputs import MachineFlags, ModelFlags
    from zerofit.scripts.facts import Model, ScriptFacts


def source_of(flags: ModelFlags) -> ModelSource:
    """Return the model that the flags name.

    Raises:
        UserError: there is none, or it can't be planned with the lengths that the flags give.
    """
    name = check_named(flags)
    source = probe_model(
        name, task=flags.task, trust_remote_code=flags.trust_remote_code, is_fast=flags.is_fast
    )
    if source.facts.vocab_size and flags.sequence_length is None and source.task is not Task.SPEECH_SEQ2SEQ:
        raise _no_length(source.facts, name)
    check_sequence_length(source.facts, flags.sequence_length, flags.target_length)
    return source


def check_named(flags: ModelFlags) -> str:
    """Return the model that --model names.

    Raises:
        UserError: there is none.
    """
    if flags.model is not None:
        return flags.model
    raise UserError(
        "model-missing",
        "a plan needs a model",
        found="neither a script nor --model",
        why="its dimensions decide what fits",
        fix="name the script that trains it, or give --model with a folder, a config.json, a hub id or a "
        "name of the catalog",
    )


def with_length_of_speech(flags: ModelFlags, source: ModelSource) -> tuple[ModelFlags, str]:
    """Return the flags, of a speech model with the longest text where none is said, and a note of it."""
    most = source.facts.max_sequence_length
    if source.task is not Task.SPEECH_SEQ2SEQ or flags.sequence_length is not None or not most:
        return flags, ""
    note = f"{most} tokens of text in each sample, the most that the decoder takes, beside audio of 30 s"
    return replace(flags, sequence_length=most), f"{note}: say --seq-len"


def workload_of(flags: ModelFlags, request: Request, facts: ModelFacts) -> Workload:
    """Return what one optimizer step has to process."""
    return Workload(
        global_batch_size=request.global_batch_size,
        sequence_length=flags.sequence_length if facts.vocab_size else None,
        target_length=flags.target_length if facts.num_decoder_layers else None,
        is_padded=flags.is_padded is not False,
        keeps_outputs=flags.loop is not Loop.TRAINER,
    )


def machine_of(
    flags: MachineFlags, *, num_nodes: int, gpus: str | None = None, target: tuple[str, ...] | None = None
) -> SpecifiedMachine:
    """Return the machine that the flags describe, or the one that is here.

    Args:
        flags: what was said of it.
        num_nodes: machines that take part.
        gpus: in place of --gpus.
        target: the script with its arguments, among which --gpus may stand by mistake.

    Raises:
        UserError: no GPU is here, or a flag can't be read.
    """
    spec = gpus or flags.gpus
    if spec is not None:
        return machine_of_spec(
            spec,
            num_nodes=num_nodes,
            host_ram=flags.host_ram,
            nvme=flags.nvme,
            cpu_cores=flags.cpu_cores,
            network=flags.network,
            host_bandwidth=flags.host_bandwidth,
        )
    said = [
        f"--{name.replace('_', '-')} {value}"
        for name in ("host_ram", "nvme", "cpu_cores", "network", "host_bandwidth")
        if (value := getattr(flags, name)) is not None
    ]
    if said:
        raise UserError(
            "gpus-missing",
            "a machine that is not here needs its GPUs",
            found=f"{' '.join(said)} without --gpus",
            why="without --gpus the plan is for the machine that is here, as it is",
            fix=put_before("--gpus", target)
            or "add --gpus, such as --gpus 8xA100-80G, or leave the others out",
        )
    machine = probe_machine()
    if not machine.gpus:
        raise no_gpus_here(put_before("--gpus", target) or _SAY_GPUS)
    return SpecifiedMachine(machine=machine, assumptions=())


_SAY_GPUS = "say which GPUs the run will have, such as --gpus 8xA100-80G"


def no_gpus_here(fix: str) -> UserError:
    """Return what is said where a plan has no GPU to be made for."""
    return UserError(
        "no-gpus-here",
        "there is no GPU on this machine to plan for",
        found="no GPU that the driver shows",
        why="a plan holds memory and rates of GPUs against the model",
        fix=fix,
    )


def problem_of(
    flags: ModelFlags,
    *,
    request: Request,
    source: ModelSource,
    machine: Machine,
    versions: Versions,
    topology: Topology,
    script: ScriptFacts | None = None,
) -> Problem:
    """Return the problem that the flags pose on one machine.

    Args:
        flags: what was said of model and workload.
        request: what was said of the strategy.
        source: the model.
        machine: one node.
        versions: of what will run.
        topology: the ranks.
        script: what will run; None where it is not known.

    Raises:
        UserError: the ranks do not divide the global batch.
    """
    workload = workload_of(flags, request, source.facts)
    if workload.global_batch_size is not None:
        split_global_batch(
            global_batch_size=workload.global_batch_size,
            micro_batch_size=None,
            gradient_accumulation_steps=None,
            data_parallel_size=topology.data_parallel_size,
        )
    loaded_in, note = weights_of(flags, source.facts, versions)
    return Problem(
        model=source.facts,
        machine=machine,
        topology=topology,
        workload=workload,
        versions=versions,
        request=request,
        allow=flags.allow,
        reserve=flags.reserve,
        makes_model_first=makes_model_first(script),
        expandable_segments=flags.expandable_segments,
        loaded_in=loaded_in,
        notes=(note,) if note else (),
    )


def weights_of(flags: ModelFlags, facts: ModelFacts, versions: Versions) -> tuple[Precision, str]:
    """Return the format in which a script loads its weights where it names none, and a note of it.

    from_pretrained() takes the checkpoint's format from transformers 5 on, and fp32 before
    (modeling_utils.py, dtype="auto").
    """
    if flags.dtype is not None:
        return flags.dtype, ""
    stored = DTYPES.get(facts.checkpoint_dtype, Precision.FP32)
    if stored is Precision.FP32 or release_of(versions.transformers or "5") < (5,):
        return Precision.FP32, ""
    return stored, (
        f"weights load in {facts.checkpoint_dtype}, as the checkpoint is and transformers 5 takes it: say "
        "--dtype fp32 for a script that loads them so"
    )


def captured_problem_of(
    flags: ModelFlags,
    *,
    request: Request,
    capture: Capture,
    machine: Machine,
    versions: Versions,
    topology: Topology,
) -> Problem:
    """Return the problem that a captured script poses on one machine.

    Args:
        flags: what was said of the planning.
        request: what was said of the strategy.
        capture: what the script trains.
        machine: one node.
        versions: of what will run.
        topology: the ranks.

    Raises:
        UserError: the ranks do not divide the global batch.
    """
    from zerofit.planning.from_capture import problem_from_capture  # only where a script was captured

    steps = request.gradient_accumulation_steps
    if steps is not None and capture.route is Route.ACCELERATE:
        if steps not in (capture.gradient_accumulation_steps, capture.passes_per_step):
            raise _accumulation_is_the_scripts(request, capture)
        request = replace(request, gradient_accumulation_steps=None)  # the script's own, which stays
    return problem_from_capture(
        capture,
        request=request,
        machine=machine,
        versions=versions,
        topology=topology,
        allow=flags.allow,
        reserve=flags.reserve,
        takes_fastest=flags.takes_fastest,
        expandable_segments=flags.expandable_segments,
    )


_OF_A_MODEL = {
    "sequence_length": "--seq-len",
    "target_length": "--target-len",
    "task": "--task",
    "is_padded": "--padded or --no-padded",
    "loop": "--loop",
    "dtype": "--dtype",
    "trust_remote_code": "--trust-remote-code",
}
"""Flags that say of a model what a script that was captured shows by itself."""


def check_model_flags(flags: ModelFlags) -> None:
    """Return where no flag says of the model what a script shows by itself.

    Raises:
        UserError: one does.
    """
    given = [flag for field, flag in _OF_A_MODEL.items() if getattr(flags, field) not in (None, False)]
    if given:
        raise UserError(
            "model-flag-without-model",
            "a flag says of the model what the script shows by itself",
            found=f"{', '.join(given)} without --model",
            why="the plan is made from what the script was seen to train, and two answers could contradict",
            fix=f"leave out {given[0]}, or name the model too: --model MODEL",
        )


def _accumulation_is_the_scripts(request: Request, capture: Capture) -> UserError:
    steps, own = request.gradient_accumulation_steps, capture.passes_per_step
    place = request.said_by.get("gradient_accumulation_steps")
    said = "--gradient-accumulation-steps" if place is None else f"{place}: gradient_accumulation_steps"
    return UserError(
        "accumulation-is-the-scripts",
        "the accumulation of this script is made in the script",
        found=f"{said} {steps}, and its loop steps after {own} forward {'pass' if own == 1 else 'passes'}",
        why="its batches can be split into smaller ones; how many of them make a step is its own, as the "
        "global batch is",
        fix="give --micro-batch-size to split its batches, or change the number in the script"
        if place is None
        else f"write {own} there, or leave it out",
    )


def _no_length(facts: ModelFacts, model: str) -> UserError:
    most = facts.max_sequence_length
    return UserError(
        "sequence-length-missing",
        "a plan needs the length of the samples",
        found=f"--model {model} without --seq-len",
        why="activations grow with it",
        fix=f"give --seq-len{f', at most {most}' if most else ''}",
    )


_UNDER_ZERO_INIT = (ModelConstructor.PRETRAINED, ModelConstructor.CONFIG)
"""Constructors that transformers runs under zero.Init; a class that is called makes its model whole."""


def makes_model_first(script: ScriptFacts | None) -> bool:
    """Return True if a script's model comes to stage 3 whole.

    transformers makes a model under zero.Init where an HfDeepSpeedConfig of stage 3 is alive: an Accelerator
    or TrainingArguments made before holds one, whatever zero3_init_flag says, and deepspeed.initialize()
    does not. A model that is made earlier lies whole on the host, or on the GPU if the script moved it there,
    and the engine moves it to the GPU whole before it is partitioned. Left out: a script that moves it there
    itself, in a type wider than the one that it trains in, needs that type's bytes for a while.
    Source: transformers 5.23, modeling_utils.py:1435, :3811; accelerate 1.15, utils/dataclasses.py:1459
    (set_deepspeed_weakref); deepspeed 0.19.8, runtime/engine.py:2092.

    Args:
        script: None where there is no script to read; the model is then taken to be made after.
    """
    return script is not None and any(_comes_whole(model) for model in script.models if model.is_trained)


def _comes_whole(model: Model) -> bool:
    if model.is_in_zero_init:
        return False
    return model.is_before_all or model.source not in _UNDER_ZERO_INIT
