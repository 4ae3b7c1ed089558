"""The subject of a plan: a model given by --model, or a captured training script."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.checking.read_targets import script_file
from zerofit.core.batch import split_global_batch
from zerofit.core.command import Route
from zerofit.core.errors import Unreadable, UserError
from zerofit.core.facts import Workload
from zerofit.core.strategy import DTYPES, Precision
from zerofit.core.supported import release_of
from zerofit.models.dimensions import check_sequence_length
from zerofit.models.find import probe_model
from zerofit.models.task import Task
from zerofit.planning.inputs import Loop
from zerofit.planning.problem import Problem
from zerofit.planning.stages import with_stage_blocks
from zerofit.scripts.capture_summary import capture_lines
from zerofit.scripts.facts import ModelConstructor
from zerofit.scripts.target import script_of, script_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.core.capture import Capture
    from zerofit.core.facts import Machine, ModelFacts, Versions
    from zerofit.core.plan import Topology
    from zerofit.core.request import Request
    from zerofit.models.source import ModelSource
    from zerofit.planning.inputs import ModelFlags
    from zerofit.scripts.capture.capture import CapturedScript
    from zerofit.scripts.facts import Model, ScriptFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject(ABC):
    """What is planned for: it supplies the facts and traces of plans."""

    flags: ModelFlags

    @property
    @abstractmethod
    def said(self) -> str:
        """What the user gave: "--model llama-3-8b", "train.py"."""

    @property
    @abstractmethod
    def facts(self) -> ModelFacts:
        """The model's dimensions."""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.facts.name

    @property
    def capture(self) -> Capture | None:
        """The capture of the script; None for a named model."""
        return None

    @property
    def lines(self) -> tuple[str, ...]:
        """A summary of the capture, in lines; empty for a named model."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions, one sentence each, beyond those of the capture's summary."""
        return ()

    @abstractmethod
    def problem(
        self, *, request: Request, machine: Machine, versions: Versions, topology: Topology
    ) -> Problem:
        """Return the problem of planning for it on one machine.

        Raises:
            UserError: the ranks do not divide the global batch, or a flag can't be applied to a script.
        """

    @abstractmethod
    def trace(self, request: TraceRequest, *, on_progress: Callable[[str], None]) -> Trace:
        """Return the trace of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel(Subject):
    """A model given by --model."""

    source: ModelSource
    script: ScriptFacts | None = None
    """Facts from the source of the script that will train it; None without a script."""
    length_note: str = ""
    """The assumption about the sequence length; empty for none."""

    @property
    def said(self) -> str:
        return f"--model {self.flags.model}"

    @property
    def facts(self) -> ModelFacts:
        return self.source.facts

    @property
    def notes(self) -> tuple[str, ...]:
        """How a catalog entry differs from what is published, and the assumed sequence length."""
        of_catalog = f"{self.source.name}: {self.source.note}" if self.source.note else ""
        return tuple(filter(None, (of_catalog, self.length_note)))

    def problem(
        self, *, request: Request, machine: Machine, versions: Versions, topology: Topology
    ) -> Problem:
        flags, facts = self.flags, self.facts
        if request.global_batch_size is not None:
            split_global_batch(
                global_batch_size=request.global_batch_size,
                micro_batch_size=None,
                gradient_accumulation_steps=None,
                data_parallel_size=topology.data_parallel_size,
            )
        loaded_in, note = weight_format(flags, facts, versions)
        return Problem(
            model=facts,
            machine=machine,
            topology=with_stage_blocks(topology, facts),
            workload=Workload(
                global_batch_size=request.global_batch_size,
                sequence_length=flags.sequence_length if facts.vocab_size else None,
                target_length=flags.target_length if facts.num_decoder_layers else None,
                is_padded=flags.is_padded is not False,
                keeps_outputs=flags.loop is not Loop.TRAINER,
            ),
            versions=versions,
            request=request,
            allow=flags.allow,
            reserve=flags.reserve,
            source=self.script,
            makes_model_first=makes_model_first(self.script),
            expandable_segments=flags.expandable_segments,
            loaded_in=loaded_in,
            notes=(note,) if note else (),
        )

    def trace(self, request: TraceRequest, *, on_progress: Callable[[str], None]) -> Trace:
        """Return the trace of a micro-batch, from the cache if it is there."""
        from zerofit.models.trace import trace_model
        from zerofit.models.trace.cache import default_cache_folder

        folder = default_cache_folder(os.environ, Path.home())
        return trace_model(self.source, request, cache_folder=folder, on_progress=on_progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedRun(Subject):
    """A captured script."""

    script: CapturedScript
    engine: str = ""
    """The engine that the launch command's files set up, if the script itself sets up none."""

    @property
    def said(self) -> str:
        return script_of(self.capture.target)

    @property
    def name(self) -> str:
        return self.capture.model.name

    @property
    def facts(self) -> ModelFacts:
        return self.capture.model.facts

    @property
    def capture(self) -> Capture:
        """The capture of the script, with the engine that runs it without zerofit."""
        seen = self.script.capture  # unchanged, since a second capture is compared with it
        return seen if seen.engine or not self.engine else replace(seen, engine=self.engine)

    @property
    def lines(self) -> tuple[str, ...]:
        """A summary of the capture, which says if it is from the cache."""
        return capture_lines(self.capture, is_cached=self.script.is_cached)

    def problem(
        self, *, request: Request, machine: Machine, versions: Versions, topology: Topology
    ) -> Problem:
        from zerofit.planning.from_capture import problem_from_capture  # only where a script was captured

        script = script_path(self.capture.target)
        problem = problem_from_capture(
            self.capture,
            self.flags,
            request=request,
            machine=machine,
            versions=versions,
            topology=topology,
        )
        return replace(problem, source=None if script is None else _facts_of(script))

    def trace(self, request: TraceRequest, *, on_progress: Callable[[str], None]) -> Trace:
        """Return the trace of a micro-batch through the model that the script created."""
        on_progress("the script's own model")
        return self.script.trace(request)


def named_model(flags: ModelFlags, *, script: str | None = None) -> NamedModel:
    """Return the model given by --model.

    Args:
        script: the file that will train it; None without a script.

    Raises:
        UserError: it is missing, or does not support the flags' lengths.
    """
    source = probe_model(
        check_named(flags), task=flags.task, trust_remote_code=flags.trust_remote_code, is_fast=flags.is_fast
    )
    facts, note, length = source.facts, "", flags.sequence_length
    if facts.vocab_size and length is None:
        most = facts.max_sequence_length
        if source.task is not Task.SPEECH_SEQ2SEQ:
            raise _no_length(facts, flags)
        if most:
            length = most
            note = f"{most} tokens of text in each sample, the most that the decoder takes, "
            note += "beside audio of 30 s: say --seq-len"
    check_sequence_length(facts, length, flags.target_length)
    read = None if script is None else _facts_of(script)
    is_trainer = read is not None and read.route is Route.TRAINER
    loop = flags.loop or (Loop.TRAINER if is_trainer else None)
    flags = replace(flags, sequence_length=length, loop=loop)
    return NamedModel(flags=flags, source=source, script=read, length_note=note)


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
        fix="name the script that trains it, or give --model with a folder, a config.json, a hub id or a "
        "name of the catalog",
    )


def _no_length(facts: ModelFacts, flags: ModelFlags) -> UserError:
    most = facts.max_sequence_length
    return UserError(
        "sequence-length-missing",
        "a plan needs the length of the samples",
        found=f"--model {flags.model} without --seq-len",
        why="activations grow with it",
        fix=f"give --seq-len{f', at most {most}' if most else ''}",
    )


def _facts_of(script: str) -> ScriptFacts | None:
    """Return the facts of a script's source; None if it can't be read."""
    source = script_file(script).source
    if source is None:
        return None
    from zerofit.scripts.source.read_script import read_script  # imports many modules

    try:
        return read_script(source, name=script)
    except Unreadable:
        return None  # checking the script reports the error


def weight_format(flags: ModelFlags, facts: ModelFacts, versions: Versions) -> tuple[Precision, str]:
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
