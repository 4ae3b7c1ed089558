"""InferenceWorkload and InferenceRequest: what is to be generated, and what flags fix about how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.core.errors import UserError
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage
from zerofit.core.validation import check_at_least
from zerofit.generation.generation_job import Gather
from zerofit.planning.ranks import check_ranks

if TYPE_CHECKING:
    from zerofit.core.facts import Machine, Versions

"""Precisions by their names in torch."""
FLAGS = {
    "zero_stage": "--zero-stage",
    "param_offload": "--param-offload",
    "nvme_path": "--nvme-path",
    "num_processes": "--num-processes",
    "num_nodes": "--num-machines",
    "batch_size": "--batch-size",
    "precision": "--dtype",
    "gather": "--gather",
    "on_cpu": "--cpu",
}
"""The command-line flag of each field of InferenceRequest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceWorkload:
    """Prompts and their completions."""

    num_prompts: int
    longest_prompt: int
    """Tokens of the longest prompt; of an encoder-decoder, those that its encoder reads."""
    max_new_tokens: int
    """Tokens that one completion may have."""
    num_beams: int = 1
    """Completions of one prompt that grow beside each other: each has a cache."""
    num_return_sequences: int = 1
    """Completions of one prompt that are returned."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "num_prompts")
        fields = ("longest_prompt", "max_new_tokens", "num_beams", "num_return_sequences")
        check_at_least(self, 1, *fields)

    @property
    def sequences_per_prompt(self) -> int:
        """Rows that one prompt takes in a batch.

        Beams are expanded to num_beams rows, samples to num_return_sequences; of beams num_return_sequences
        are returned, which are no more than there are.
        Source: transformers 5.23, generation/utils.py, _expand_inputs_for_generation in generate().
        """
        return max(self.num_beams, self.num_return_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """Values that the user's flags fix; None leaves the choice to the planner."""

    zero_stage: ZeroStage | None = None
    """0: each rank holds the whole model. 3: its parameters are partitioned."""
    param_offload: OffloadDevice | None = None
    """Where the parts of the parameters rest between uses."""
    nvme_path: str | None = None
    """Folder on the NVMe disk, without which nothing is offloaded there."""
    num_processes: int | None = None
    """Ranks on all nodes together."""
    num_nodes: int | None = None
    """Machines that take part; one where nothing is said."""
    batch_size: int | None = None
    """Prompts in one call on one rank."""
    precision: Precision | None = None
    """Format of the weights and of what is computed with them."""
    gather: Gather = Gather.AUTO
    """ALWAYS needs the whole model beside each rank's part; the others need no more than NEVER."""
    on_cpu: bool = False
    """True leaves GPUs alone."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_processes", "num_nodes", "batch_size")


def check_request(machine: Machine, request: InferenceRequest, *, versions: Versions) -> None:
    """Check that the flags agree with each other and with the machine.

    Raises:
        UserError: the ranks can't be made, or a flag brings nothing.
        ExceptionGroup: of UserErrors, where the flags break a compatibility rule.
    """
    stage, offload = request.zero_stage, request.param_offload
    if stage in (ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS):
        raise UserError(
            "generate-stage-pointless",
            f"ZeRO stage {stage.value} partitions nothing that generation has",
            found=f"--zero-stage {stage.value}",
            why="stages 1 and 2 partition optimizer states and gradients; each rank would hold the whole"
            " model, as with stage 0",
            fix="give --zero-stage 0 for the whole model on each rank, 3 for a part of it, or leave it out",
            see="https://www.deepspeed.ai/tutorials/zero/#zero-overview",
        )
    if stage is ZeroStage.NOTHING and request.gather is Gather.ALWAYS:
        raise UserError(
            "generate-gather-needs-zero3",
            "there are no weights to gather",
            found="--gather always with --zero-stage 0",
            why="each rank holds the whole model already",
            fix="leave out --gather",
        )
    if offload is not None:  # a folder alone allows what the planner may choose
        strategy = Strategy(
            engine=Engine.DEEPSPEED,
            zero_stage=ZeroStage.PARAMETERS if stage is None else stage,
            param_offload=offload,
            nvme_path=request.nvme_path,
        )
        situation = situation_of_strategy(strategy, topology=Topology(), versions=versions)
        if errors := check(situation, rules=ALL_RULES).of(Severity.ERROR):
            raise ExceptionGroup("flags that contradict each other", [one.as_error() for one in errors])
    if request.num_processes is not None:
        check_ranks(
            request.num_processes,
            num_nodes=request.num_nodes or 1,
            num_gpus=None if request.on_cpu or not machine.gpus else len(machine.gpus),
            said=f"--num-processes {request.num_processes}",
        )
