"""PipelineEngine: one stage of a model, as torch's 1F1B schedule runs it without DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.planning.estimate.engines.native import NativeEngine

if TYPE_CHECKING:
    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.engine import Setup

STAGE_BUFFERS = "stage buffers"
_EXPLANATION = (
    "hidden states of a micro-batch x micro-batches, of the stage before, and so many gradients of the next; "
    "a gradient that is sent",
    "torch/distributed/pipelining/stage.py, args_recv_info and grad_recv_info: kept from pass to pass (2.13)",
)


class PipelineEngine(NativeEngine):
    """Weights, gradients and states of one stage, whole on each rank that holds it.

    A pass makes gradients of its own, which are added to those that wait while the script accumulates, and
    averaged over the copies of the model in place (training/pipeline/pipeline.py).
    """

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        assert setup.stage is not None
        self._stage = setup.stage
        self._of_pass: dict[int, int] = {}
        self._has_buffers = False
        self._sent: int | None = None

    def explain(self, term: str) -> tuple[str, str] | None:
        return _EXPLANATION if term == STAGE_BUFFERS else super().explain(term)

    def initialise(self) -> None:
        """Nothing: no DistributedDataParallel wraps a stage, and buffers come with the first batch."""

    def pass_begins(self) -> None:
        if self._has_buffers:
            return
        self._has_buffers, stage = True, self._stage
        neighbours = (stage.number > 0) + (stage.number < stage.num_stages - 1)
        for _ in range(neighbours * stage.micro_batches(self.setup.strategy)):
            self._allocate_hidden_states()

    def micro_batch_ends(self) -> None:
        """Keep the gradient that goes to the stage before until the next one does."""
        if self._sent is None and self._stage.number > 0:
            self._sent = self._allocate_hidden_states()

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
        if self._sent is not None:
            self.tape.free(self._sent)
            self._sent = None
