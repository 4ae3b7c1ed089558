"""The subject of a plan: a model that --model names, or the training that a capture saw."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from zerofit.core.capture import for_plan
from zerofit.planning.make_problem import captured_problem_of, problem_of
from zerofit.scripts.capture_summary import capture_lines
from zerofit.scripts.target import script_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.core.capture import Capture
    from zerofit.core.facts import Machine, ModelFacts, Versions
    from zerofit.core.plan import Topology
    from zerofit.core.request import Request
    from zerofit.models.source import ModelSource
    from zerofit.planning.inputs import ModelFlags
    from zerofit.planning.problem import Problem
    from zerofit.scripts.capture.capture import CapturedScript
    from zerofit.scripts.facts import ScriptFacts


class Subject(Protocol):
    """A source of facts that plans are made from, and of the traces that its problems need."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def said(self) -> str:
        """The name that the user gave: "--model llama-3-8b", "train.py"."""

    @property
    def facts(self) -> ModelFacts:
        """The model's dimensions."""

    @property
    def capture(self) -> Capture | None:
        """The capture of a script; None where no script was run."""

    @property
    def lines(self) -> tuple[str, ...]:
        """A summary of the capture, in lines; empty where no script was run."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions about it, one sentence each."""

    @property
    def identity(self) -> str:
        """All that decides its traces, in words."""

    def problem(
        self, *, request: Request, machine: Machine, versions: Versions, topology: Topology
    ) -> Problem:
        """Return the problem that it poses on one machine."""

    def trace(self, request: TraceRequest, *, on_progress: Callable[[str], None]) -> Trace:
        """Return what its micro-batch allocates and computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model that --model names."""

    flags: ModelFlags
    source: ModelSource
    script: ScriptFacts | None = None
    """The source of the script that will train it; None where there is none yet."""
    length_note: str = ""
    """Assumptions about the samples' length."""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.source.name

    @property
    def said(self) -> str:
        """The name that the user gave."""
        return f"--model {self.flags.model}"

    @property
    def facts(self) -> ModelFacts:
        """The model's dimensions."""
        return self.source.facts

    @property
    def capture(self) -> None:
        """No script was run."""
        return

    @property
    def lines(self) -> tuple[str, ...]:
        """None: no script was run."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Where a catalog entry differs from what is published, and what length was assumed."""
        of_catalog = f"{self.source.name}: {self.source.note}" if self.source.note else ""
        return tuple(filter(None, (of_catalog, self.length_note)))

    @property
    def identity(self) -> str:
        """The model's configuration and what was said of it."""
        return repr(self.source)

    def problem(
        self, *, request: Request, machine: Machine, versions: Versions, topology: Topology
    ) -> Problem:
        """Return the problem that it poses on one machine."""
        return problem_of(
            self.flags,
            request=request,
            source=self.source,
            machine=machine,
            versions=versions,
            topology=topology,
            script=self.script,
        )

    def trace(self, request: TraceRequest, *, on_progress: Callable[[str], None]) -> Trace:
        """Return what its micro-batch allocates and computes, from the cache where it lies there."""
        from zerofit.models.trace import trace_model
        from zerofit.models.trace.cache import default_cache_folder

        folder = default_cache_folder(os.environ, Path.home())
        return trace_model(self.source, request, cache_folder=folder, on_progress=on_progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedRun:
    """A script with its arguments, as it was seen to train."""

    flags: ModelFlags
    script: CapturedScript
    engine: str = ""
    """The engine that the launch line's files ask for, where the script itself asks for none."""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.capture.model.name

    @property
    def said(self) -> str:
        """The name that the user gave."""
        return script_of(self.capture.target)

    @property
    def facts(self) -> ModelFacts:
        """The model's dimensions."""
        return self.capture.model.facts

    @property
    def capture(self) -> Capture:
        """The capture of the script, with the engine that runs it without zerofit."""
        seen = self.script.capture  # which stays as it is: a second run is compared with it
        return seen if seen.engine or not self.engine else replace(seen, engine=self.engine)

    @property
    def lines(self) -> tuple[str, ...]:
        """A summary of the capture, which says if it is from the cache."""
        return capture_lines(self.capture, is_kept=self.script.is_kept)

    @property
    def notes(self) -> tuple[str, ...]:
        """None: what the capture assumed stands in its own lines."""
        return ()

    @property
    def identity(self) -> str:
        """All of the capture but how long it took, how much memory, and secret arguments."""
        return repr(for_plan(self.capture))

    def problem(
        self, *, request: Request, machine: Machine, versions: Versions, topology: Topology
    ) -> Problem:
        """Return the problem that it poses on one machine."""
        return captured_problem_of(
            self.flags,
            request=request,
            capture=self.capture,
            machine=machine,
            versions=versions,
            topology=topology,
        )

    def trace(self, request: TraceRequest, *, on_progress: Callable[[str], None]) -> Trace:
        """Return what its micro-batch allocates and computes: of the very model that the script made."""
        on_progress("the script's own model")
        return self.script.trace(request)
