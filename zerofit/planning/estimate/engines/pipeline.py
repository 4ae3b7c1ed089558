"""PipelineEngine: a rank's pipeline stages, run by torch's 1F1B schedules without DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.planning.estimate.engines.native import NativeEngine

if TYPE_CHECKING:
    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.engine import Setup

STAGE_BUFFERS = "stage buffers"
_EXPLANATION = (
    "for each stage of the rank: hidden states of a micro-batch x micro-batches, of the stage before, and so "
    "many gradients of the next; one gradient that is sent, where each rank has one stage",
    "torch/distributed/pipelining/stage.py, args_recv_info and grad_recv_info: kept from pass to pass (2.13)",
)


class PipelineEngine(NativeEngine):
    """Whole weights, gradients and states of a rank's stages.

    Each pass makes its own gradients, which are added to the accumulated ones, and averaged over the
    pipeline's replicas in place (training/pipeline/pipeline.py).
    """

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        assert setup.stage is not None
        self._stage = setup.stage
        self._of_pass: dict[int, int] = {}
        self._has_buffers = False
        self._sent: int | None = None
        self._outputs: list[int] = []
        """Of stages that have not run backward, while the rank's next stage has."""

    def explain(self, term: str) -> tuple[str, str] | None:
        return _EXPLANATION if term == STAGE_BUFFERS else super().explain(term)

    def initialise(self) -> None:
        """Nothing: DistributedDataParallel wraps no stage, and buffers are allocated with the first batch."""

    def pass_begins(self) -> None:
        if self._has_buffers:
            return
        self._has_buffers, stage = True, self._stage
        for number in stage.numbers:
            neighbours = (number > 0) + (number < stage.num_stages - 1)
            for _ in range(neighbours * stage.micro_batches(self.setup.strategy)):
                self._allocate_hidden_states()

    def stage_ends(self, number: int) -> None:
        """Keep what outlives a stage's backward pass.

        Schedule1F1B holds the gradient that it sends to the previous stage until it sends the next. A stage
        keeps its output until it has run backward; a log of several stages frees it once the next of them
        has, whose input it is there.
        """
        stage = self._stage
        if self._sent is None and number > 0 and not stage.blocks:
            self._sent = self._allocate_hidden_states()
        if number + stage.num_ranks < stage.num_stages:
            self.tape.free(self._outputs.pop())
        if number >= stage.num_ranks:
            self._outputs.append(self._allocate_hidden_states())

    def _allocate_hidden_states(self) -> int:
        size = self._stage.hidden_bytes_per_sample * self.setup.micro_batch_size
        return self.tape.allocate(size, STAGE_BUFFERS)

    def gradient_ready(self, parameter: int, block: int) -> None:
        if parameter in self._of_pass:
            self.tape.free(block)  # it was added to an earlier micro-batch's
        else:
            self._of_pass[parameter] = block

    def backward_ends(self, *, is_boundary: bool) -> None:
        for parameter, block in self._of_pass.items():
            super().gradient_ready(parameter, block)
        self._of_pass = {}
        if self._sent is not None:
            self.tape.free(self._sent)
            self._sent = None
