"""PipelineEngine: a rank's stages of a model, as torch's 1F1B schedules run them without DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.planning.estimate.engines.native import NativeEngine

if TYPE_CHECKING:
    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.engine import Setup

STAGE_BUFFERS = "stage buffers"
_EXPLANATION = (
    "hidden states of a micro-batch x micro-batches, of the stage before, and so many gradients of the next, "
    "of each stage; what is sent: a gradient, or all of a pass where stages are interleaved",
    "torch/distributed/pipelining/stage.py, args_recv_info and grad_recv_info: kept from pass to pass; "
    "schedules.py, _PipelineScheduleRuntime: waits for what it sent at the end of a pass (2.13)",
)


class PipelineEngine(NativeEngine):
    """Weights, gradients and states of a rank's stages, whole on each rank that holds them.

    A pass makes gradients of its own, which are added to those that wait while the script accumulates, and
    averaged over the copies of the model in place (training/pipeline/pipeline.py).
    """

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        assert setup.stage is not None
        self._stage = setup.stage
        self._of_pass: dict[int, int] = {}
        self._has_buffers = False
        self._sent: list[int] = []
        """What other ranks may still read: gradients, and hidden states where stages are interleaved."""

    def explain(self, term: str) -> tuple[str, str] | None:
        return _EXPLANATION if term == STAGE_BUFFERS else super().explain(term)

    def initialise(self) -> None:
        """Nothing: no DistributedDataParallel wraps a stage, and buffers come with the first batch."""

    def pass_begins(self, *, left_out: int) -> None:
        stage = self._stage
        if stage.blocks:
            for number in list(stage.numbers) * left_out:
                self.stage_ends(number)
        if self._has_buffers:
            return
        self._has_buffers = True
        for number in stage.numbers:
            for _ in range(self._neighbours(number) * stage.micro_batches(self.setup.strategy)):
                self._allocate_hidden_states()

    def stage_ends(self, number: int) -> None:
        """Keep what was sent: all of a pass if stages are interleaved, else a gradient until the next one."""
        stage = self._stage
        if stage.blocks:
            # The log frees the output of one of the rank's stages once the next has run backward.
            is_top = number + stage.num_ranks >= stage.num_stages
            sent = (number > 0) + (number >= stage.num_ranks) + (is_top and number < stage.num_stages - 1)
            self._sent += [self._allocate_hidden_states() for _ in range(sent)]
        elif not self._sent and number > 0:
            self._sent = [self._allocate_hidden_states()]

    def _neighbours(self, number: int) -> int:
        """Return the stages that a stage exchanges hidden states and their gradients with."""
        return (number > 0) + (number < self._stage.num_stages - 1)

    def _allocate_hidden_states(self) -> int:
        size = self._stage.hidden_bytes_per_sample * (self.setup.strategy.micro_batch_size or 1)
        return self.tape.allocate(size, STAGE_BUFFERS)

    def gradient_ready(self, parameter: int, block: int) -> None:
        if parameter in self._of_pass:
            self.tape.free(block)  # it was added to that of an earlier micro-batch
        else:
            self._of_pass[parameter] = block

    def backward_ends(self, *, is_boundary: bool) -> None:
        for parameter, block in self._of_pass.items():
            super().gradient_ready(parameter, block)
        self._of_pass = {}
        for block in self._sent:
            self.tape.free(block)
        self._sent = []
