"""problem_from_capture: the Problem of a captured script, with the script's constraints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.check_run import refuse
from zerofit.checking.constraints import constraints_of, micro_batch_of
from zerofit.checking.inputs.optimizer import optimizer_of_class
from zerofit.checking.inputs.strategy import said_fields
from zerofit.checking.rules import LIMITS
from zerofit.checking.situation import RunSettings, Situation
from zerofit.core.capture import DECODER_TOKENS
from zerofit.core.command import Launcher, Route
from zerofit.core.errors import UserError
from zerofit.core.facts import Workload
from zerofit.core.request import FLAGS, Request
from zerofit.core.strategy import DTYPES, OptimizerName, Precision
from zerofit.core.units import format_bytes
from zerofit.planning.estimate.device_memory.optimizers import ScriptOptimizer, Stepper
from zerofit.planning.inputs import ModelFlags
from zerofit.planning.plan_from_flags import fields_said
from zerofit.planning.problem import Allow, Problem, Script
from zerofit.planning.stages import with_stage_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from zerofit.core.capture import Capture, CapturedBatch, CapturedOptimizer, CapturedTensor
    from zerofit.core.facts import Machine, Versions
    from zerofit.core.plan import Topology

_TWO_STATES = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta")
_ONE_STATE = ("SGD", "RMSprop", "Adagrad", "Lion", "Muon", "ASGD", "LARS")
"""Optimizer classes of torch and bitsandbytes, by the states that their step() keeps per parameter."""
_TWO = {
    (False, False): OptimizerName.ADAMW,
    (False, True): OptimizerName.PAGED_ADAMW,
    (True, False): OptimizerName.ADAMW_8BIT,
    (True, True): OptimizerName.PAGED_ADAMW_8BIT,
}
_BITSANDBYTES = {
    "Adam": _TWO,
    "AdamW": _TWO,
    "Lion": {
        (False, False): OptimizerName.LION,
        (False, True): OptimizerName.LION,
        (True, False): OptimizerName.LION_8BIT,
        (True, True): OptimizerName.PAGED_LION_8BIT,
    },
}
"""bitsandbytes' families, by (8 bit, paged)."""
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element; packed and 8-bit weights take at most 1."""
_PAD_MULTIPLES = (128, 64, 32, 16, 8)
"""ASSUMPTION: the values of pad_to_multiple_of that collators use."""


def problem_from_capture(
    capture: Capture,
    flags: ModelFlags | None = None,
    *,
    request: Request,
    machine: Machine,
    versions: Versions,
    topology: Topology,
) -> Problem:
    """Return the problem of planning for a captured script on one machine.

    Args:
        flags: planning flags; --allow length is ignored, as only the script can change its samples.

    Raises:
        UserError: a flag can't be applied to the script or sets another global batch than the script's, or
            its batch does not divide over the ranks.
    """
    flags = flags or ModelFlags()
    steps, place = request.gradient_accumulation_steps, request.said_by.get("gradient_accumulation_steps")
    if steps is not None and capture.route is Route.ACCELERATE and (place or not request.micro_batch_size):
        if steps in (capture.gradient_accumulation_steps, capture.passes_per_step):
            request = replace(request, gradient_accumulation_steps=None)  # the script's own
        elif place:
            raise _accumulation_is_the_scripts(steps, capture, place)
    _check_limits(capture, topology, request)
    script = script_on_ranks(capture, topology, request)
    workload, notes = _workload(capture, _global_batch_size(capture, script, request, topology))
    left_out = {one: why for one in sorted(flags.allow) if (why := _why_left_out(one, script))}
    notes += tuple(f"--allow {one} is left out: {why}" for one, why in left_out.items())
    return Problem(
        model=capture.model.facts,
        machine=machine,
        topology=with_stage_blocks(topology, capture.model.facts),
        workload=workload,
        versions=versions,
        request=request,
        allow=flags.allow - left_out.keys(),
        reserve=flags.reserve,
        takes_fastest=flags.takes_fastest,
        makes_model_first=capture.model.is_made_whole or not capture.model.is_transformers,
        loads_weights=capture.model.loads_weights,
        expandable_segments=flags.expandable_segments,
        script=script,
        notes=(*notes, *_notes(capture, script)),
    )


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
    if capture.model.is_quantized and not _is_in_4_bit(capture):
        yield f"the weights of {capture.model.name} are counted as wide as they are before quantization"
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


def _is_in_4_bit(capture: Capture) -> bool:
    """Return True if the script loads its weights in bitsandbytes' 4 bits, which a trace supports."""
    said = capture.model.config.get("quantization_config")
    return isinstance(said, dict) and bool(said.get("load_in_4bit"))


def script_on_ranks(capture: Capture, topology: Topology, request: Request) -> Script:
    """Return a captured script with the facts that depend on its ranks."""
    model = capture.model
    dtypes = {name.strip() for module in model.modules for name in module.dtype.split(",")}
    stepper, note = own_stepper(capture.optimizer)
    return Script(
        capture=capture,
        constraints=constraints_of(capture, topology=topology).beside(request),
        micro_batch_size=micro_batch_of(capture, topology),
        optimizer=stepper,
        optimizer_id=optimizer_of_class(capture.optimizer.class_path) if capture.optimizer else None,
        optimizer_note=note,
        weights=DTYPES.get(model.weight_dtype, Precision.FP32),
        weight_bytes=0
        if model.is_quantized
        else min(_BYTES.get(name, 1) for name in dtypes or {model.weight_dtype}),
    )


def _check_limits(capture: Capture, topology: Topology, request: Request) -> None:
    """Check settings and ranks against what a captured script can take.

    Raises:
        UserError, ExceptionGroup: it can't take them.
    """
    fields = said_fields(fields_said(request), places=request.said_by)
    names = FLAGS | {name: f"{name} in {place}" for name, place in request.said_by.items()}
    if request.says_qlora:  # one flag sets two fields
        names |= dict.fromkeys(("lora", "quantization"), "--qlora")
        fields |= {
            name: replace(fields[name], text="--qlora") for name in ("lora", "quantization") if name in fields
        }
    settings = RunSettings(names=names, fields=fields)
    situation = Situation(
        settings=settings,
        typed=("on_cpu",) if request.on_cpu else (),
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
    _check_limits(capture, topology, Request())  # the user's settings were checked before
    script = script_on_ranks(capture, topology, problem.request)
    size = _global_batch_size(capture, script, problem.request, topology)
    return replace(changed, script=script, workload=replace(problem.workload, global_batch_size=size))


def _global_batch_size(capture: Capture, script: Script, request: Request, topology: Topology) -> int | None:
    own, asked = capture.global_batch_size(topology.data_parallel_size), request.global_batch_size
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


def _workload(capture: Capture, global_batch_size: int | None) -> tuple[Workload, tuple[str, ...]]:
    lengths, notes = capture.lengths, []
    length = None
    if lengths is not None:
        length = max([_padded_length(capture), *_widths(capture.batches, "input_ids")])
        if not lengths.is_whole:
            notes.append(
                f"the longest of the {lengths.num_samples} samples that were looked at, {lengths.longest} "
                "tokens, stands for all"
            )
    target = None
    if capture.model.facts.num_decoder_layers:
        widths = [width for name in DECODER_TOKENS for width in _widths(capture.batches, name)]
        target = max(widths, default=None)
        if len(set(widths)) > 1:
            notes.append(f"targets of {target} tokens, the longest of the first batches, stand for all")
    return (
        Workload(
            global_batch_size=global_batch_size,
            sequence_length=length,
            target_length=target,
            is_padded=any(map(_is_padded, capture.batches)),
            keeps_outputs=capture.route is not Route.TRAINER,
        ),
        tuple(notes),
    )


def _padded_length(capture: Capture) -> int:
    """Return the length of the longest sample, rounded up as the script's collator does."""
    assert capture.lengths is not None
    longest = capture.lengths.longest
    widths = [
        (width, max(batch.lengths))
        for batch in capture.batches
        for width in _widths((batch,), "input_ids")
        if batch.lengths
    ]
    if all(width == inner for width, inner in widths):
        return longest
    for multiple in _PAD_MULTIPLES:
        if all(width == -(-inner // multiple) * multiple for width, inner in widths):
            return -(-longest // multiple) * multiple
    return longest


def _widths(batches: tuple[CapturedBatch, ...], name: str) -> Iterator[int]:
    """Yield the last dimension of a tensor in each batch; input_ids may have another name."""
    for batch in batches:
        tensor = _tensor(batch, name)
        if tensor is not None and len(tensor.shape) > 1:
            yield tensor.shape[-1]


def _tensor(batch: CapturedBatch, name: str) -> CapturedTensor | None:
    found = next((one for one in batch.tensors if one.name.rpartition(".")[2] == name), None)
    if found is None and name == "input_ids" and batch.lengths:
        return next((one for one in batch.tensors if len(one.shape) > 1 and "int" in one.dtype), None)
    return found


def _is_padded(batch: CapturedBatch) -> bool:
    """Return True if a batch contains padding."""
    mask = _tensor(batch, "attention_mask")
    return mask is not None and bool(batch.lengths) and min(batch.lengths) < mask.shape[-1]


def own_stepper(optimizer: CapturedOptimizer | None) -> tuple[Stepper, str]:
    """Return the kind as which estimates count a script's optimizer, and the assumption made.

    Args:
        optimizer: None if the script has several or none.

    Returns:
        The kind, and a sentence that is empty if nothing is assumed.
    """
    if optimizer is None:
        return None, "the optimizer is counted as AdamW, as none or several were seen"
    settings = optimizer.groups[0].settings if optimizer.groups else {}
    library, _, name = optimizer_of_class(optimizer.class_path).partition(".")
    is_paged, name = name.startswith("Paged"), name.removeprefix("Paged")
    family = name.removesuffix("8bit").removesuffix("32bit")
    has_8_bit = name.endswith("8bit")
    kind: Stepper
    if library == "other" or family not in (*_TWO_STATES, *_ONE_STATE, "Adafactor"):
        shown = optimizer.class_path.rpartition(".")[2]
        if name in ("FusedAdam", "DeepSpeedCPUAdam"):
            return OptimizerName.ADAMW, ""
        return None, f"{shown} is counted as AdamW: what it keeps is not known"
    if family == "Adafactor":
        kind = OptimizerName.ADAFACTOR
    elif library == "bitsandbytes" and family in _BITSANDBYTES:
        kind = _BITSANDBYTES[family][has_8_bit, is_paged]
    elif family in _TWO_STATES:
        kind = OptimizerName.ADAMW if settings.get("fused") is True else None
    elif family == "SGD" and library == "torch":
        kind = _sgd(settings)
    else:
        kind = ScriptOptimizer.ONE_STATE_8BIT if has_8_bit else ScriptOptimizer.ONE_STATE
    if settings.get("amsgrad"):
        return kind, f"{name} is counted without the third state that amsgrad keeps"
    if is_paged and kind is OptimizerName.LION:
        return kind, "the pages of PagedLion are counted as if they stayed on the GPU"
    if is_paged:
        return (
            kind,
            f"the pages of Paged{name} are counted on the host, where the driver may move them",
        )
    return kind, ""


def _sgd(settings: Mapping[str, Any]) -> Stepper:
    """Return the kind of torch's SGD by the temporaries of its step: weight decay copies the gradients."""
    decays = bool(settings.get("weight_decay"))
    if settings.get("momentum"):
        return ScriptOptimizer.ONE_STATE if decays else ScriptOptimizer.MOMENTUM
    is_foreach = settings.get("foreach") is not False and settings.get("fused") is not True
    return ScriptOptimizer.DECAYED_SGD if decays and is_foreach else OptimizerName.SGD
