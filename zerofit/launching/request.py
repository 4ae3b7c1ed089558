"""LaunchRequest: a script, its flags, and this node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.secrets import masked
from zerofit.planning.inputs import MachineFlags, ModelFlags
from zerofit.planning.plan_from_flags import asks_for_cpu
from zerofit.planning.problem import MemoryLimits

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.core.facts import Machine
    from zerofit.core.request import Request
    from zerofit.launching.config_files import ConfigFiles
    from zerofit.launching.nodes import Nodes


_NO_LIMITS = MemoryLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A script, the settings for its run, and this node."""

    target: tuple[str, ...]
    request: Request
    model: ModelFlags
    machine: Machine
    """This node; in a dry run the one to plan for."""
    elsewhere: MachineFlags
    """Flags of another machine to plan for, in a test on the CPU or a dry run."""
    captures: bool
    """True if the script may be captured."""
    capture_limit_s: float
    """Time limit for the script to reach its training."""
    plan_file: Path | None
    """File of the plan in `request`."""
    nodes: Nodes
    """The nodes of the run, and the GPUs of this one."""
    dry_run: bool
    """True to start nothing."""
    limits: MemoryLimits = _NO_LIMITS
    """Memory limits from earlier attempts of the run."""
    made_folders: tuple[Path, ...] = ()
    """Folders that earlier attempts created, whose contents don't invalidate a cached capture."""
    num_fastest: int = 0
    """Number of the fastest alternative strategies to plan, for trials."""
    config_files: ConfigFiles | None = None
    """The settings in the launch line's configuration files; None without files."""

    @property
    def on_cpu(self) -> bool:
        """True if the ranks run on the CPU."""
        return asks_for_cpu(self.request)

    @property
    def gpus(self) -> str | None:
        """GPUs of another machine to plan for."""
        return self.elsewhere.gpus

    @property
    def is_elsewhere(self) -> bool:
        """True if a dry run shows what would run on another machine."""
        is_planned = self.request.plan is not None and self.machine == self.request.plan.machine
        return self.dry_run and not self.on_cpu and (self.gpus is not None or is_planned)

    @property
    def has_given_strategy(self) -> bool:
        """True if a preset or plan file gives the strategy."""
        return self.request.preset is not None or self.request.plan is not None

    @property
    def plans_for_script(self) -> bool:
        """True if a plan is made from a capture of the script."""
        is_open = self.model.model is None and self.captures and not self.has_given_strategy
        return is_open and (not self.on_cpu or self.gpus is not None)

    @property
    def makes_a_plan(self) -> bool:
        """True if a plan is made: from the script, or from --model."""
        return self.model.model is not None or self.plans_for_script

    @property
    def why_unplanned(self) -> str:
        """The flag that prevents planning."""
        if self.has_given_strategy:
            return f"--preset {self.request.preset}" if self.request.preset else f"--plan {self.plan_file}"
        return "--cpu" if self.captures else "--no-capture"

    @property
    def lacks_micro_batch(self) -> bool:
        """True if a global batch is given, but no micro-batch."""
        request = self.request
        planned = request.plan.strategy.micro_batch_size if request.plan else None
        return request.global_batch_size is not None and not (request.micro_batch_size or planned)

    @property
    def has_plan_of_other_run(self) -> bool:
        """True if the plan file was made for another script, or for other arguments."""
        capture = self.request.plan.capture if self.request.plan is not None else None
        return capture is not None and masked(capture.target) != masked(self.target)

    @property
    def may_capture(self) -> bool:
        """True if the script is captured."""
        needs = self.plans_for_script or self.lacks_micro_batch or self.has_plan_of_other_run
        return self.captures and self.model.model is None and needs
