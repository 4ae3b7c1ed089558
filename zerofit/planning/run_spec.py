"""RunSpec: what a user asked for, from flags, files, a launch line, a preset or a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zerofit.core.overrides import NOTHING_SAID, Overrides
from zerofit.core.secrets import masked
from zerofit.planning.options import MachineFlags, MemoryLimits, ModelFlags
from zerofit.planning.sources.nodes import Nodes
from zerofit.planning.sources.typed_line import TypedLine
from zerofit.scripts.capture.limit import CAPTURE_LIMIT_S

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.core.facts import Machine
    from zerofit.core.plan import Plan
    from zerofit.machine.machine_spec import SpecifiedMachine
    from zerofit.planning.sources.config_files import ConfigFiles

_OPTIONS = ModelFlags()
_HERE = MachineFlags()
_NODES = Nodes()
_NO_LIMITS = MemoryLimits()
_NO_LINE = TypedLine()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What a user asked for; made by `resolve`, the same for every verb."""

    target: tuple[str, ...] | None = None
    """The script or `-m module`, and its arguments; None for a model given by --model alone."""
    overrides: Overrides = NOTHING_SAID
    """What the user set; a plan must follow it."""
    preset: str | None = None
    """Name of a preset to start from."""
    plan: Plan | None = None
    """A plan to start from."""
    plan_file: Path | None = None
    """The file of that plan; None for a plan given as an object."""
    files: ConfigFiles | None = None
    """The settings of configuration files; None without files."""
    options: ModelFlags = _OPTIONS
    """Model and lengths, and what a plan may do."""
    described: MachineFlags = _HERE
    """The flags of another machine to plan for."""
    machine: SpecifiedMachine | None = None
    """The machine to plan for; None until it is known."""
    node: Machine | None = None
    """This node, for a verb that runs; in a dry run the one to plan for."""
    nodes: Nodes = _NODES
    """The nodes of the run, and the GPUs of this one."""
    on_cpu: bool = False
    """True to ignore GPUs, by --cpu or a file."""
    captures: bool = True
    """True if the script may be captured."""
    capture_limit_s: float = CAPTURE_LIMIT_S
    """Time limit for the script to reach its training."""
    dry_run: bool = False
    """True to start nothing."""
    limits: MemoryLimits = _NO_LIMITS
    """Memory limits from earlier attempts of the run."""
    own_folders: tuple[Path, ...] = ()
    """Possible output folders that did not exist before the run; they don't invalidate a cached capture."""
    num_fastest: int = 0
    """Number of the fastest alternative strategies to plan, for trials."""
    typed: TypedLine = field(default=_NO_LINE, compare=False, repr=False)
    """The command line; empty if there was none."""

    def setting(self, where: str = "", **values: Any) -> RunSpec:
        """Return the spec with other values of overrides; None removes one.

        Args:
            where: where they come from, for reasons; by default their flags.
            values: by field.
        """
        return replace(self, overrides=self.overrides.setting(where, **values))

    @property
    def runs_on_cpu(self) -> bool:
        """True if the ranks run on the CPU, as the user or the plan's says."""
        return self.on_cpu or (self.plan is not None and self.plan.asks_for_cpu)

    @property
    def gpus(self) -> str | None:
        """GPUs of another machine to plan for."""
        return self.described.gpus

    @property
    def is_here(self) -> bool:
        """True if the machine to plan for is this one."""
        return self.described.gpus is None

    @property
    def is_elsewhere(self) -> bool:
        """True if a dry run shows what would run on another machine."""
        is_planned = self.plan is not None and self.node == self.plan.machine
        return self.dry_run and not self.runs_on_cpu and (self.gpus is not None or is_planned)

    @property
    def has_given_strategy(self) -> bool:
        """True if a preset or plan file gives the strategy."""
        return self.preset is not None or self.plan is not None

    @property
    def plans_for_script(self) -> bool:
        """True if a plan is made from a capture of the script."""
        is_open = self.options.model is None and self.captures and not self.has_given_strategy
        return is_open and (not self.runs_on_cpu or self.gpus is not None)

    @property
    def makes_a_plan(self) -> bool:
        """True if a plan is made: from the script, or from --model."""
        return self.options.model is not None or self.plans_for_script

    @property
    def why_unplanned(self) -> str:
        """The flag that prevents planning."""
        if self.has_given_strategy:
            return f"--preset {self.preset}" if self.preset else f"--plan {self.plan_file}"
        return "--cpu" if self.captures else "--no-capture"

    @property
    def lacks_micro_batch(self) -> bool:
        """True if a global batch is given, but no micro-batch."""
        planned = self.plan.strategy.micro_batch_size if self.plan else None
        has_batch = self.overrides.has("global_batch_size")
        return has_batch and not (self.overrides.get("micro_batch_size") or planned)

    @property
    def has_plan_of_other_run(self) -> bool:
        """True if the plan file was made for another script, or for other arguments."""
        capture = self.plan.capture if self.plan is not None else None
        return capture is not None and masked(capture.target) != masked(self.target or ())

    @property
    def may_capture(self) -> bool:
        """True if the script is captured."""
        needs = self.plans_for_script or self.lacks_micro_batch or self.has_plan_of_other_run
        return self.captures and self.options.model is None and needs

    @property
    def ranks_said(self) -> str:
        """The number of ranks: the flag for it, unless something else sets it."""
        world_size = self.overrides.get("world_size")
        is_flag = self.overrides.where("world_size") == "--num-processes"
        return f"--num-processes {world_size}" if is_flag else f"{world_size} ranks"
