"""Fsdp2Engine: FSDP2 as its trace recorded it, for whole optimizer steps."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import Event, TensorKind
from zerofit.core.errors import UserError
from zerofit.core.estimates import RunPhase
from zerofit.core.optimizers.memory import Temporaries
from zerofit.core.strategy import OffloadDevice, StateDictType
from zerofit.planning.estimate.device_memory.non_torch_memory import cublas_workspace_bytes
from zerofit.planning.estimate.device_memory.optimizers import STATES, TEMPORARIES, Stepped
from zerofit.planning.estimate.engines.engine import (
    NUM_STEPS,
    WEIGHTS,
    WORKSPACE,
    SimulatedEngine,
    sizes_of,
    terms_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from zerofit.core.allocation_log import AllocationLog, Shard
    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.engine import Setup

GATHERED_STATE = "gathered state dict"
_SHARDS = "weight shards"


class Fsdp2Engine(SimulatedEngine):
    """Shards of weights, gradients and states on each rank; the log has all else that the engine allocates.

    The log is that of a whole optimizer step but for the step itself, with FSDP2 run in it.
    """

    EXPLANATIONS: Mapping[str, tuple[str, str]] = {
        WEIGHTS: (
            "b P of the unit that is moved to the GPU and sharded",
            "torch/distributed/fsdp/_fully_shard/_fsdp_init.py, _move_states_to_device",
        ),
        _SHARDS: (
            "b P / ranks that share a copy, rounded up for each tensor; b = 4 for what trains in 16 bit",
            "traced; accelerate/utils/fsdp_utils.py, fsdp2_prepare_model",
        ),
        TensorKind.GATHERED.value: (
            "b P of the units gathered at that moment: the running one, the next, and those not resharded",
            "traced: FSDP2 itself, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
        ),
        TensorKind.GATHER_BUFFER.value: (
            "b P of the unit that is gathered, and b P / ranks cast to the format of the forward pass",
            "traced: FSDP2 itself, _fsdp_collectives.py, foreach_all_gather",
        ),
        TensorKind.REDUCE_BUFFER.value: (
            "b P of the gradients of the unit that is reduced and of the one before it",
            "traced: FSDP2 itself, _fsdp_collectives.py, foreach_reduce",
        ),
        TEMPORARIES: (
            "two tensors of a shard at a time, as torch steps DTensors one by one",
            "torch/optim/adam.py, _single_tensor_adam; torch/optim/optimizer.py, _foreach_supported_types",
        ),
        GATHERED_STATE: (
            "b P of one whole tensor at a time, which is copied to the host",
            "traced: torch/distributed/checkpoint/state_dict.py, get_model_state_dict",
        ),
    }

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        if not setup.log.shards:
            raise fsdp2_needs_trace()
        self._shards = setup.log.shards
        self._is_offloaded = setup.strategy.param_offload is not OffloadDevice.NONE
        self._num_steps = 0
        self._has_cublas = [False, False]

    def explain(self, term: str) -> tuple[str, str] | None:
        if term == STATES:
            return self.optimizer.costs.formula, self.optimizer.costs.source
        return super().explain(term)

    def load(self) -> None:
        """Shard unit by unit: each is moved to the GPU, and freed once its shards are there."""
        self.take_buffers()
        units = sorted({shard.unit for shard in self._shards if shard.unit >= 0})
        for shard in self._of_unit(-1):
            self.tape.allocate(_bytes(shard), _SHARDS)  # ignored: whole, and on the GPU before
        for unit in units:
            whole = [
                self.tape.allocate(parameter.num_elements * shard.bytes_per_element, WEIGHTS)
                for parameter, shard in zip(self.setup.log.parameters, self._shards, strict=True)
                if shard.unit == unit
            ]
            for shard in self._of_unit(unit):
                block = self.tape.allocate(_bytes(shard), _SHARDS)
                if self._is_offloaded:
                    self.tape.free(block)
            self.drop(whole)

    def _of_unit(self, unit: int) -> Iterable[Shard]:
        return (shard for shard in self._shards if shard.unit == unit)

    def played(self, *, sketch: bool = False) -> Iterator[None]:
        """Play load, NUM_STEPS optimizer steps, and a save, step by step.

        Where batches have widths of their own, as many steps are played, each with one width.

        Args:
            sketch: play the micro-batches of the last step alone.
        """
        setup, tape, shares = self.setup, self.tape, self.setup.shares or (1.0,) * NUM_STEPS
        tape.begin(RunPhase.LOAD)
        self.load()
        tape.begin(RunPhase.INITIALISE)
        outputs: list[int] = []
        for step, share in enumerate(shares, 1):
            gradients: list[int] = []
            if not sketch or step == len(shares):
                gradients, outputs = self._play_micro_batches(outputs, share)
            if setup.trains:
                tape.begin(RunPhase.STEP)
                self._step()
            self.drop(gradients)
            yield
        self.drop(outputs)
        if setup.trains:
            tape.begin(RunPhase.SAVE)
            self.save()

    def _play_micro_batches(self, outputs: list[int], share: float) -> tuple[list[int], list[int]]:
        """Play the log; return the blocks of what is left: gradients, and the outputs that the loop holds.

        Args:
            outputs: blocks that the loop holds until the first forward pass is over.
            share: width of the batches, as a share of the traced one.
        """
        log, terms = self.setup.log, _terms(self.setup.log)
        events = list(zip(log.codes, log.arguments, strict=True))
        if events[-1][0] == Event.BACKWARD_ENDS:  # of the last micro-batch: no forward pass follows
            events.pop()
        held, blocks = list(outputs), dict[int, int]()

        def forward_ends(_: int) -> None:
            self._begin(RunPhase.BACKWARD)
            self.drop(held)
            held.clear()

        self._begin(RunPhase.FORWARD)
        self.tape.write_events(
            events,
            blocks,
            sizes=sizes_of(log, self.setup.micro_batch_size * share),
            terms=terms,
            hooks={
                int(Event.FORWARD_ENDS): forward_ends,
                int(Event.BACKWARD_ENDS): lambda _: self._begin(RunPhase.FORWARD),
            },
            streams=log.storages.streams,
        )
        kept = {TensorKind.OUTPUT.value, TensorKind.INPUT.value}
        left = [block for storage, block in blocks.items() if terms[storage] in kept]
        return [block for storage, block in blocks.items() if terms[storage] not in kept], left

    def _begin(self, phase: RunPhase) -> None:
        self.tape.begin(phase)
        place = phase is RunPhase.BACKWARD  # autograd's own thread has a cuBLAS handle of its own
        if not self._has_cublas[place]:
            self.tape.allocate(cublas_workspace_bytes(self.setup.compute_capability), WORKSPACE)
            self._has_cublas[place] = True

    def _step(self) -> None:
        """Step the shards, which are on the host under offload."""
        if self._is_offloaded:
            return
        tensors = [
            Stepped(
                num_elements=_own_elements(shard),
                bytes_per_element=shard.bytes_per_element,
                shape=shard.shape,
                is_embedding=parameter.is_embedding,
            )
            for parameter, shard in zip(self.setup.log.parameters, self._shards, strict=True)
            if parameter.trains and self.setup.trains
        ]
        costs = self.optimizer.costs
        optimizer = self.optimizer
        if costs.temporaries is Temporaries.ALL_AT_ONCE:  # foreach, which torch takes for plain tensors alone
            optimizer = replace(optimizer, costs=replace(costs, temporaries=Temporaries.NONE))
        optimizer.step(self.tape, tensors, is_first=self._num_steps == 0)
        if costs.temporaries is Temporaries.ALL_AT_ONCE:
            for tensor in tensors:
                self.drop([self.tape.allocate(tensor.num_bytes, TEMPORARIES) for _ in range(2)])
        self._num_steps += 1

    def save(self) -> None:
        """Gather the state dict if it is a full one."""
        if self.setup.strategy.state_dict_type is not StateDictType.FULL:
            return
        blocks: dict[int, int] = {}
        for entry in self.setup.log.save.entries:
            if entry > 0:
                size = self.setup.log.save.sizes[entry - 1]
                blocks[entry] = self.tape.allocate(size, GATHERED_STATE)
            else:
                self.tape.free(blocks.pop(-entry))
        self.drop(blocks.values())


def fsdp2_needs_trace() -> UserError:
    """Return the error for FSDP2 with a log that no trace of it made."""
    return UserError(
        "fsdp2-needs-trace",
        "FSDP2 can't be planned by --fast",
        found="FSDP2 with closed forms in place of a trace",
        why="there are no formulas for FSDP2's memory: zerofit runs FSDP2 itself, in a trace",
        fix="leave out --fast",
    )


def _bytes(shard: Shard) -> int:
    return shard.num_elements * shard.bytes_per_element


def _own_elements(shard: Shard) -> int:
    size = 1
    for length in shard.shape:
        size *= length
    return size


@lru_cache(maxsize=16)
def _terms(log: AllocationLog) -> list[str]:
    return terms_of(log)
