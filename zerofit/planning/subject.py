"""The subject of a plan: a model given by --model, or a captured training script."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.checking.script_files import script_file
from zerofit.core.command import Route
from zerofit.core.errors import Unreadable, UserError
from zerofit.core.facts import Workload
from zerofit.core.strategy import DTYPES, Precision
from zerofit.core.supported import release_of
from zerofit.models.dimensions import check_sequence_length, longer_note
from zerofit.models.find import probe_model
from zerofit.models.task import Task
from zerofit.models.weight_formats import format_of, notes_on_format
from zerofit.planning.estimate.model_use import ModelUse, use_in_script, use_of_named
from zerofit.planning.options import Loop
from zerofit.planning.samples import lengths_of_batches, samples_of
from zerofit.scripts.capture_summary import capture_lines
from zerofit.scripts.facts import ModelConstructor
from zerofit.scripts.target import script_of, script_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.core.capture import Capture
    from zerofit.core.facts import ModelFacts, Versions
    from zerofit.models.source import ModelSource
    from zerofit.planning.options import ModelFlags
    from zerofit.scripts.capture.capture import CapturedScript
    from zerofit.scripts.facts import Model, ScriptFacts

    Tracer = Callable[[TraceRequest, Callable[[str], None]], Trace]
    TracerAhead = Callable[[Sequence[TraceRequest], Callable[[], None]], None]

_NO_SAMPLES = Workload()
_ANY_USE = ModelUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is planned for: made by `describe` from --model, or by `captured_subject` from a script."""

    said: str
    """What the user gave: "--model llama-3-8b", "train.py"."""
    name: str
    """The model's name."""
    facts: ModelFacts
    """The model's dimensions."""
    source: ScriptFacts | None = None
    """Facts from the script's source, for the rules on what each rank runs; None if unknown."""
    capture: Capture | None = None
    """The capture of the script, with the engine that runs it without zerofit; None for a named model."""
    samples: Workload = _NO_SAMPLES
    """Lengths and padding of the samples; the global batch depends on the ranks."""
    use: ModelUse = _ANY_USE
    """How the script makes and feeds the model."""
    notes: tuple[str, ...] = ()
    """Assumptions, one sentence each."""
    lines: tuple[str, ...] = ()
    """A summary of the capture, in lines; empty for a named model."""
    tracer: Tracer | None = field(default=None, compare=False, repr=False)
    """Returns the trace of a micro-batch; it tells its progress to a function. None if nothing can trace."""
    tracer_ahead: TracerAhead | None = field(default=None, compare=False, repr=False)
    """Makes traces that the tracer will be asked for, at one time, and calls a function first if any lacks;
    None if that is no faster."""


def describe(options: ModelFlags, *, versions: Versions, script: str | None = None) -> Subject:
    """Return the model given by --model.

    Args:
        options: the flags of model and lengths.
        versions: of the libraries that load the model.
        script: the file that will train it; None without a script.

    Raises:
        UserError: it is missing, or does not support the flags' lengths.
    """
    source = probe_model(
        check_named(options),
        task=options.task,
        trust_remote_code=options.trust_remote_code,
        is_fast=options.is_fast,
        takes_quantized=True,
    )
    facts, notes, length = source.facts, [], options.sequence_length
    if source.note:
        notes.append(f"{source.name}: {source.note}")
    if facts.vocab_size and length is None:
        length = facts.max_sequence_length
        if _needs_length(source):
            raise _no_length(source, options)
        note = f"{length} tokens of text in each sample, the most that the decoder takes, "
        notes.append(note + "beside audio of 30 s: say --seq-len")
    check_sequence_length(facts, length, options.target_length)
    read = None if script is None else facts_of_script(script)
    is_trainer = read is not None and read.route is Route.TRAINER
    loaded_in, note = loaded_format(options, facts, versions)
    form = format_of(source.config)
    if form is not None:
        notes += notes_on_format(facts.name, form)
    return Subject(
        said=f"--model {options.model}",
        name=facts.name,
        facts=facts,
        source=read,
        samples=Workload(
            sequence_length=length if facts.vocab_size else None,
            target_length=options.target_length if facts.num_decoder_layers else None,
            is_padded=options.is_padded is not False,
            keeps_outputs=(options.loop or (Loop.TRAINER if is_trainer else None)) is not Loop.TRAINER,
        ),
        use=replace(
            use_of_named(facts, loaded_in, weight_format=form, makes_model_first=makes_model_first(read)),
            can_checkpoint=source.can_checkpoint,
        ),
        notes=tuple(line for line in (*notes, note, longer_note(facts, length)) if line),
        tracer=partial(_trace_named, source),
        tracer_ahead=partial(_trace_named_ahead, source),
    )


def needs_length(options: ModelFlags) -> bool:
    """Return True if a plan of the model given by --model needs the length of its samples.

    Raises:
        UserError: there is no such model.
    """
    return _needs_length(
        probe_model(check_named(options), task=options.task, is_fast=True, takes_quantized=True)
    )


def _needs_length(source: ModelSource) -> bool:
    facts = source.facts
    has_default = source.task is Task.SPEECH_SEQ2SEQ and bool(facts.max_sequence_length)
    return bool(facts.vocab_size) and not has_default


def _trace_named(source: ModelSource, request: TraceRequest, on_progress: Callable[[str], None]) -> Trace:
    """Return the trace of a micro-batch, from the cache if it is there."""
    from zerofit.models.trace import trace_model
    from zerofit.models.trace.cache import default_cache_folder

    folder = default_cache_folder(os.environ, Path.home())
    return trace_model(source, request, cache_folder=folder, on_progress=on_progress)


def _trace_named_ahead(
    source: ModelSource, requests: Sequence[TraceRequest], on_start: Callable[[], None]
) -> None:
    """Write the traces of several micro-batches into the cache, if there is one."""
    from zerofit.models.trace.ahead import trace_ahead
    from zerofit.models.trace.cache import default_cache_folder

    folder = default_cache_folder(os.environ, Path.home())
    if folder is not None:
        trace_ahead(source, requests, cache_folder=folder, on_start=on_start)


def captured_subject(run: CapturedScript, *, engine: str = "") -> Subject:
    """Return a captured script, which must stay loaded while it is traced.

    Args:
        engine: the engine that the launch line's files set up, if the script itself sets up none.
    """
    seen = run.capture  # unchanged, since a second capture is compared with it
    capture = seen if seen.engine or not engine else replace(seen, engine=engine)
    script = script_path(capture.target)

    def trace(request: TraceRequest, on_progress: Callable[[str], None]) -> Trace:
        return run.trace(request, on_progress)

    return replace(
        subject_of_capture(capture),
        source=None if script is None else facts_of_script(script),
        lines=capture_lines(capture, is_cached=run.is_cached),
        tracer=trace,
    )


def subject_of_capture(capture: Capture) -> Subject:
    """Return what a capture shows, without the script, which could be read and traced."""
    model, samples = capture.model, samples_of(capture)
    longer = "" if model.facts is None else longer_note(model.facts, samples.sequence_length)
    return Subject(
        said=script_of(capture.target),
        name=model.name,
        facts=model.facts,
        capture=capture,
        samples=samples,
        use=replace(use_in_script(capture), lengths=lengths_of_batches(capture)),
        notes=(longer,) if longer else (),
    )


def check_named(flags: ModelFlags) -> str:
    """Return the name given by --model.

    Raises:
        UserError: it is missing.
    """
    if flags.model is not None:
        return flags.model
    raise UserError(
        "model-missing",
        "a plan needs a model",
        found="neither a script nor --model",
        why="its dimensions decide what fits",
        fix="name the script that trains it, as in zerofit plan train.py; or give --model with a folder, a "
        "config.json, a hub id or a name of `zerofit models`, and --seq-len and --global-batch-size",
    )


def _no_length(source: ModelSource, flags: ModelFlags) -> UserError:
    most = source.facts.max_sequence_length
    at_most = f", at most {most}" if most else ""
    if source.task in (Task.CTC, Task.AUDIO_CLASSIFICATION):
        at_most = " with the values of a sample's audio: 16000 for each second"
    return UserError(
        "sequence-length-missing",
        "a plan needs the length of the samples",
        found=f"--model {flags.model} without --seq-len",
        why="activations grow with it",
        fix=f"give --seq-len{at_most}",
    )


def facts_of_script(script: str) -> ScriptFacts | None:
    """Return the facts of a script's source; None if it can't be read."""
    source = script_file(script).source
    if source is None:
        return None
    from zerofit.scripts.source.read_script import read_script  # imports many modules

    try:
        return read_script(source, name=script)
    except Unreadable:
        return None  # checking the script reports the error


def loaded_format(flags: ModelFlags, facts: ModelFacts, versions: Versions) -> tuple[Precision, str]:
    """Return the format in which a script loads its weights by default, and a note about it.

    from_pretrained() uses the checkpoint's format since transformers 5, and fp32 before (modeling_utils.py,
    dtype="auto").
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


_UNDER_ZERO_INIT = (ModelConstructor.PRETRAINED, ModelConstructor.CONFIG)
"""Constructors that transformers runs under zero.Init; calling the class creates the model whole."""


def makes_model_first(script: ScriptFacts | None) -> bool:
    """Return True if a script creates its model outside zero.Init, so that stage 3 gets it whole.

    transformers creates a model under zero.Init while an HfDeepSpeedConfig of stage 3 is alive: an
    Accelerator or TrainingArguments holds one, regardless of zero3_init_flag; deepspeed.initialize() does
    not. A model created earlier is whole on the host, or on the GPU if the script moved it there, and the
    engine moves it to the GPU whole before it partitions it. Not counted: a script that moves it there itself
    in a wider type than it trains in temporarily needs that type's bytes.
    Source: transformers 5.23, modeling_utils.py:1435, :3811; accelerate 1.15, utils/dataclasses.py:1459
    (set_deepspeed_weakref); deepspeed 0.19.8, runtime/engine.py:2092.

    Args:
        script: None without a script; its model is then assumed to be created under zero.Init.
    """
    return script is not None and any(_is_made_whole(model) for model in script.models if model.is_trained)


def _is_made_whole(model: Model) -> bool:
    if model.is_in_zero_init:
        return False
    return model.is_before_setup or model.source not in _UNDER_ZERO_INIT
