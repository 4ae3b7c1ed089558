"""problem_of: what to plan: what was asked for, the model or script, and the ranks of a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.constraints import constraints_of, micro_batch_of
from zerofit.checking.engine import refuse
from zerofit.checking.inputs.strategy import said_fields
from zerofit.checking.rules import LIMITS
from zerofit.checking.situation import RunSettings, Situation
from zerofit.core.batch import split_global_batch
from zerofit.core.command import Launcher, Route
from zerofit.core.errors import UserError
from zerofit.core.optimizers.lookup import optimizer_of_class
from zerofit.core.overrides import FLAGS, Overrides
from zerofit.core.units import format_bytes
from zerofit.models.weight_formats import format_of, notes_on_format
from zerofit.planning.estimate.model_use import own_stepper
from zerofit.planning.options import Allow
from zerofit.planning.problem import Problem, Script
from zerofit.planning.samples import notes_on_samples
from zerofit.planning.stages import with_stage_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.capture import Capture
    from zerofit.core.facts import Machine, Versions
    from zerofit.core.plan import Topology
    from zerofit.planning.run_spec import RunSpec
    from zerofit.planning.subject import Subject


def problem_of(
    spec: RunSpec, subject: Subject, *, machine: Machine, topology: Topology, versions: Versions
) -> Problem:
    """Return the problem of planning what a user asked for, on the ranks of one machine.

    Raises:
        UserError: a setting can't be applied to the script or sets another global batch than the script's,
            or the batch does not divide over the ranks.
    """
    topology = with_stage_blocks(topology, subject.facts)
    problem = Problem(
        spec=spec,
        subject=subject,
        machine=machine,
        topology=topology,
        versions=versions,
        workload=replace(subject.samples, global_batch_size=spec.overrides.get("global_batch_size")),
    )
    if subject.capture is not None:
        return _on_ranks(problem, subject.capture)
    if subject.use.is_packed:
        _check_packed(problem)
    if problem.workload.global_batch_size is not None:
        split_global_batch(
            global_batch_size=problem.workload.global_batch_size,
            micro_batch_size=None,
            gradient_accumulation_steps=None,
            data_parallel_size=topology.data_parallel_size,
        )
    return problem


def _check_packed(problem: Problem) -> None:
    """Check that adapters train beside the packed weights of a named model, and that no engine shards them.

    Raises:
        UserError: they don't, or the user's strategy partitions or quantizes the weights.
    """
    said, form = problem.said, problem.use.weight_format
    assert form is not None
    found = f"{problem.subject.said}, with weights in {form.label}"
    if form.why_not_trained:
        raise UserError(
            "quantized-checkpoint-not-trained",
            "this checkpoint can't be trained",
            found=found,
            why=form.why_not_trained,
            fix="name the original model",
        )
    if not said.get("lora"):
        raise UserError(
            "quantization-needs-lora",
            "quantized weights do not train",
            found=f"{found}, without adapters",
            why="updates are smaller than the resolution of packed weights, so adapters are trained instead",
            fix="add --lora, or name the original model",
        )
    for pin in problem.constraints.pins:
        if said.get(pin.field) is not None and said.get(pin.field) not in pin.values:
            raise UserError(
                pin.rule,
                "a quantized checkpoint is neither sharded nor quantized again",
                found=f"{found}, and {said.where(pin.field)}",
                why=pin.why,
                fix=f"leave out {said.where(pin.field)}, or name the original model",
            )


def _on_ranks(problem: Problem, capture: Capture) -> Problem:
    """Return the problem with the script on its ranks; what can't be applied to it is left out or refused."""
    spec, topology = problem.spec, problem.topology
    said = _without_own_accumulation(spec.overrides, capture)
    _check_limits(capture, topology, said, on_cpu=spec.on_cpu)
    script = script_on_ranks(capture, topology, said)
    size = _global_batch_size(capture, script, said, topology)
    left_out = {name: why for name in sorted(spec.options.allow) if (why := _why_left_out(name, script))}
    notes = [f"--allow {name} is left out: {why}" for name, why in left_out.items()]
    options = replace(spec.options, allow=spec.options.allow - left_out.keys())
    return replace(
        problem,
        spec=replace(spec, overrides=said, options=options),
        workload=replace(problem.workload, global_batch_size=size),
        script=script,
        notes=(*notes_on_samples(capture), *notes, *_notes(capture, script)),
    )


def _without_own_accumulation(said: Overrides, capture: Capture) -> Overrides:
    """Return the overrides without an accumulation that is the script's own.

    Raises:
        UserError: a file says another one than the script's.
    """
    name = "gradient_accumulation_steps"
    steps, is_in_file = said.get(name), said.is_in_file(name)
    if steps is None or capture.route is not Route.ACCELERATE:
        return said
    if is_in_file or not said.has("micro_batch_size"):
        if steps in (capture.gradient_accumulation_steps, capture.passes_per_step):
            return said.without([name])
        if is_in_file:
            raise _accumulation_is_the_scripts(steps, capture, said.where(name))
    return said


def _accumulation_is_the_scripts(steps: int, capture: Capture, place: str) -> UserError:
    own = capture.passes_per_step
    passes = f"{own} forward {'pass' if own == 1 else 'passes'}"
    return UserError(
        "accumulation-is-the-scripts",
        "the script accumulates gradients itself",
        found=f"{place}: gradient_accumulation_steps {steps}, and its loop steps after {passes}",
        why="the script sets the number of batches per step, and with it the global batch",
        fix=f"write {own} there, or leave it out",
    )


def _why_left_out(allowed: Allow, script: Script) -> str:
    """Return why an allowed change can't be applied to a script; empty if it can."""
    if allowed is Allow.LENGTH:
        return "only the script can change the length of its samples"
    fields = ("lora", "quantization") if allowed is Allow.QLORA else (allowed.value,)
    pins = (pin for pin in script.constraints.pins if pin.field in fields)
    return next((pin.why for pin in pins), "")


def _notes(capture: Capture, script: Script) -> Iterator[str]:
    if script.optimizer_note:
        yield script.optimizer_note
    yield from _format_notes(capture)
    if capture.trainer_arguments.get("activation_offloading"):
        yield (
            "activations count as on the GPU: the script's activation_offloading moves them to the host, "
            "and it needs less"
        )
    if capture.accumulates_by_hand:
        steps = capture.accumulates_by_hand
        yield f"the script itself counts {steps} forward passes to a step of its optimizer"
    if capture.other_weight_bytes:
        size = format_bytes(capture.other_weight_bytes)
        own_loss = "compute_loss" in capture.trainer_overrides
        how = "as its compute_loss() calls them, with weights of" if own_loss else "with their weights alone,"
        yield f"other models of the script are counted {how} {size} on each GPU"
    elif capture.num_models > 1:
        yield f"of the {capture.num_models} models of the script only {capture.model.name} is counted"
    if capture.num_models > 1:
        yield "a model whose inputs come from another model of the script runs without micro-batches"
    if script.micro_batch_size is None:
        yield "the size of the script's batches is unknown; its first batch is taken for all"


def _format_notes(capture: Capture) -> Iterator[str]:
    """Yield how quantized weights are counted, and what of them is not known."""
    model, form = capture.model, format_of(capture.model.config)
    if not model.is_quantized:
        return
    if form is None:
        yield f"the weights of {model.name} are counted as wide as they are before quantization"
    elif form.method != "bitsandbytes_4bit":
        yield from notes_on_format(model.name, form)


def script_on_ranks(capture: Capture, topology: Topology, said: Overrides) -> Script:
    """Return a captured script with the facts that depend on its ranks."""
    return Script(
        capture=capture,
        constraints=constraints_of(capture, topology=topology).beside(said),
        micro_batch_size=micro_batch_of(capture, topology),
        optimizer_id=optimizer_of_class(capture.optimizer.class_path) if capture.optimizer else None,
        optimizer_note=own_stepper(capture.optimizer)[1],
    )


def _check_limits(capture: Capture, topology: Topology, said: Overrides, *, on_cpu: bool = False) -> None:
    """Check settings and ranks against what a captured script can take.

    Raises:
        UserError, ExceptionGroup: it can't take them.
    """
    in_files = {name: f"{name} in {said.where(name)}" for name in said.strategy if said.is_in_file(name)}
    by_qlora = {name: "--qlora" for name in said.strategy if said.where(name) == "--qlora"}
    situation = Situation(
        settings=RunSettings(names={**FLAGS, **in_files, **by_qlora}, fields=said_fields(said)),
        typed=("on_cpu",) if on_cpu else (),
        launcher=Launcher.ZEROFIT,
        capture=capture,
        topology=topology,
    )
    refuse(situation, rules=LIMITS)


def on_other_ranks(problem: Problem, machine: Machine, topology: Topology) -> Problem:
    """Return the problem on other ranks; a script's global batch scales with them, unless the user set it.

    Raises:
        UserError: the script's batch does not divide over them.
    """
    changed = replace(problem, machine=machine, topology=topology)
    if problem.script is None:
        return changed
    capture = problem.script.capture
    _check_limits(capture, topology, Overrides())  # what the user set was checked before
    script = script_on_ranks(capture, topology, problem.said)
    size = _global_batch_size(capture, script, problem.said, topology)
    return replace(changed, script=script, workload=replace(problem.workload, global_batch_size=size))


def _global_batch_size(capture: Capture, script: Script, said: Overrides, topology: Topology) -> int | None:
    own = capture.global_batch_size(topology.data_parallel_size)
    asked: int | None = said.get("global_batch_size")
    if asked is None or asked == own:
        return own
    is_whole = "micro_batch_size" in script.constraints.settled()
    if own is not None and capture.trainer_accumulates(topology.data_parallel_size) and not is_whole:
        return asked
    raise _other_global_batch(capture, script, asked, topology)


def _other_global_batch(capture: Capture, script: Script, asked: int, topology: Topology) -> UserError:
    ranks, steps = topology.data_parallel_size, capture.passes_per_step
    size = script.micro_batch_size
    is_trainer = capture.route is Route.TRAINER
    names = (
        ("per_device_train_batch_size", "gradient_accumulation_steps")
        if is_trainer
        else ("its DataLoader's batch_size", "its gradient_accumulation_steps")
    )
    if capture.accumulates_by_hand:
        names = (names[0], "the number of passes after which it steps")
    changes = []
    if asked % (ranks * steps) == 0:
        shown = asked // steps if capture.splits_batches else asked // (ranks * steps)
        changes.append(f"{names[0]} to {shown}")
    if size is not None and asked % (ranks * size) == 0:
        changes.append(f"{names[1]} to {asked // (ranks * size)}")
    has = f"{size} x {steps} x {ranks} = {size * steps * ranks}" if size is not None else "not known"
    return UserError(
        "global-batch-is-the-scripts",
        "the global batch is set in the script",
        found=f"--global-batch-size {asked}, and the script's is {has}   (samples x accumulation x ranks)",
        why="zerofit does not change the script's DataLoader and accumulation",
        fix="leave out --global-batch-size"
        + (f", or set in the script {' or '.join(changes)}" if changes else ", or change it in the script"),
    )
