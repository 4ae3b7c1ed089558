"""HostRank: what one rank takes and gives back in host memory over a run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from zerofit.core.estimates import RunPhase
from zerofit.core.strategy import NVME, Engine, OffloadDevice, ZeroStage
from zerofit.planning.estimate.device_memory.optimizers import Stepped, make_optimizer
from zerofit.planning.estimate.engines.zero_engine import FP32
from zerofit.planning.estimate.engines.zero_flat import FlatGroup, flattens_on_gpu, sub_groups
from zerofit.planning.estimate.host_memory.ledger import CHECKPOINT, HostLedger

if TYPE_CHECKING:
    from zerofit.planning.estimate.engines.engine import Setup

WEIGHTS, CAST = "weights", "cast weights"
CONVERTED = "conversion buffer"
MASTER, STATES, GRADIENTS = "master weights", "optimizer states", "gradient partition"
WEIGHT_PARTITION, GRADIENT_BUFFER = "offloaded weights", "gradient buffer"
OPTIMIZER_SWAP, WEIGHT_SWAP = "optimizer swap buffers", "weight swap buffers"
SAVED = "saved weights"


class HostRank:
    """One rank of a run, played on a HostLedger."""

    def __init__(
        self, setup: Setup, *, rank: int, loaded_bytes_per_element: int, has_checkpoint: bool = True
    ) -> None:
        """Make the rank.

        Args:
            rank: on the first node.
            loaded_bytes_per_element: of the weights in the checkpoint, or as the script makes them.
            has_checkpoint: whether they are read from one; else they are made in the memory of each rank.
        """
        self.ledger = HostLedger()
        strategy, log = setup.strategy, setup.log
        self._setup, self._strategy, self._rank = setup, strategy, rank
        self._num_ranks = setup.topology.data_parallel_size
        self._sizes = [parameter.num_elements for parameter in log.parameters]
        self._bytes = [parameter.bytes_per_element for parameter in log.parameters]
        self._trained = [n for n, one in enumerate(log.parameters) if setup.trains and one.trains]
        self._unit = min(self._bytes) if self._trained else FP32  # see DeepSpeedEngine.unit
        is_deepspeed = strategy.engine is Engine.DEEPSPEED
        self._stage = strategy.zero_stage if is_deepspeed else ZeroStage.NOTHING
        self._casts = is_deepspeed
        self._loaded = loaded_bytes_per_element
        self._has_checkpoint = has_checkpoint
        self._is_partitioned = self._stage is ZeroStage.PARAMETERS and not setup.makes_model_first
        self._offload = strategy.optimizer_offload if self._trained else OffloadDevice.NONE
        self._accumulates = (strategy.gradient_accumulation_steps or 1) > 1
        self._parts = [-(-size // self._num_ranks) for size in self._sizes]
        self._weights: list[int] = []
        self._checkpoint: list[int] = []
        self._own_parts: dict[int, int] = {}

    def play(self) -> HostLedger:
        """Play the run and return what it held."""
        ledger = self.ledger
        ledger.begin(RunPhase.LOAD)
        self._load()
        ledger.begin(RunPhase.INITIALISE)
        self._initialise()
        ledger.begin(RunPhase.FORWARD)
        if self._trained:
            ledger.begin(RunPhase.BACKWARD)
            self._first_backward()
            ledger.begin(RunPhase.STEP)
            self._first_step()
            for phase in (RunPhase.FORWARD, RunPhase.BACKWARD):
                ledger.begin(phase)
            ledger.begin(RunPhase.SAVE)
            self._save()
        return ledger

    def _load(self) -> None:
        """from_pretrained maps the checkpoint; a tensor is copied where its type changes.

        All ranks share the file's pages, so they count with rank 0. Under zero.Init it alone reads them.
        """
        if self._is_partitioned:
            self._partition_weights()
        if self._has_checkpoint and self._rank == 0:
            self._checkpoint = [self.ledger.take(sum(self._sizes) * self._loaded, CHECKPOINT)]
        if self._is_partitioned:
            self._close_checkpoint()
            return
        for number, size in enumerate(self._sizes):
            is_mapped = self._has_checkpoint and self._loaded_bytes_of(number) == self._loaded
            num_bytes = 0 if is_mapped else size * self._loaded_bytes_of(number)
            self._weights.append(self.ledger.take(num_bytes, WEIGHTS))

    def _loaded_bytes_of(self, number: int) -> int:
        """DeepSpeed casts by itself; without it the script loads the weights as the forward pass has them."""
        return self._loaded if self._casts else self._bytes[number]

    def _close_checkpoint(self) -> None:
        for block in self._checkpoint:
            self.ledger.drop(block)
        self._checkpoint = []

    def _partition_weights(self) -> None:
        if self._strategy.param_offload is OffloadDevice.NVME:
            size = NVME.weight_buffer_count * NVME.weight_buffer_size * self._unit
            self.ledger.pin(size, WEIGHT_SWAP, pins=True)
        elif self._strategy.param_offload is OffloadDevice.CPU:
            for number, part in enumerate(self._parts):
                size = part * self._bytes[number]
                self._own_parts[number] = self.ledger.pin(size, WEIGHT_PARTITION, pins=self._pins)

    @property
    def _pins(self) -> bool:
        return self._strategy.pin_memory

    def _initialise(self) -> None:
        """The engine casts the weights on the host, moves them to the GPU, and makes what it offloads."""
        if not self._is_partitioned:
            self._cast_and_move()
            if self._stage is ZeroStage.PARAMETERS:
                self._partition_weights()
        if not self._trained:
            return
        if self._stage is ZeroStage.PARAMETERS:
            self._initialise_stage3()
        elif self._stage is not ZeroStage.NOTHING:
            self._flatten()
            if self._offload is not OffloadDevice.NONE:
                self._initialise_stage12()

    def _cast_and_move(self) -> None:
        for number, size in enumerate(self._sizes):
            if self._bytes[number] != self._loaded_bytes_of(number):
                cast = self.ledger.take(size * self._bytes[number], CAST)
                self.ledger.drop(self._weights[number])
                self._weights[number] = cast
        for block in self._weights:
            self.ledger.drop(block)
        self._weights = []
        self._close_checkpoint()

    def _flatten(self) -> None:
        """Where the GPU has no room for it, the flat buffer is made here, beside a copy of the weights."""
        group = self._group
        if flattens_on_gpu(self._setup, group.padded_elements * self._unit):
            return
        copies = self.ledger.take(group.num_elements * self._unit, WEIGHTS)
        self.ledger.flash(group.padded_elements * self._unit, WEIGHTS)
        self.ledger.drop(copies)

    def _initialise_stage12(self) -> None:
        """Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py:560 to :659, :934."""
        ledger, pins = self.ledger, self._pins
        part = self._group.partition_elements
        self._convert(part)
        ledger.pin(part * FP32, MASTER, pins=pins)
        low = ledger.take(part * self._unit, WEIGHT_PARTITION)
        if pins:
            ledger.take(part * self._unit, WEIGHT_PARTITION, is_pinned=True)
        largest = max(self._sizes[number] for number in self._trained)
        ledger.pin(largest * self._unit, GRADIENT_BUFFER, pins=pins)
        ledger.pin(part * FP32, GRADIENTS, pins=pins)
        if pins:  # the pageable one lives until the optimizer is made
            ledger.drop(low)

    @cached_property
    def _group(self) -> FlatGroup:
        sizes = tuple(self._sizes[number] for number in self._trained)
        return FlatGroup(sizes=sizes, num_ranks=self._num_ranks)

    def _initialise_stage3(self) -> None:
        """Source: deepspeed 0.19.8, runtime/zero/stage3.py:906, :1159, :1301, :791; zero/utils.py:221."""
        ledger, pins = self.ledger, self._pins
        part = sum(self._parts[number] for number in self._trained)
        if self._strategy.param_offload is OffloadDevice.CPU:
            ledger.pin(part * self._unit, WEIGHT_PARTITION, pins=True)  # pinned whatever pin_memory says
            for number in self._trained:
                ledger.drop(self._own_parts.pop(number))
        elif self._strategy.param_offload is OffloadDevice.NVME:
            ledger.pin(min(part, NVME.max_weights_in_cpu) * self._unit, WEIGHT_PARTITION, pins=True)
        else:
            ledger.flash(part * self._unit, WEIGHT_PARTITION)
        if self._offload is OffloadDevice.NONE:
            return
        groups = sub_groups([self._parts[n] for n in self._trained], self._strategy.buckets.sub_group_size)
        if self._offload is OffloadDevice.NVME:
            for _ in range(NVME.optimizer_buffer_count):
                ledger.pin(max(groups) * FP32, OPTIMIZER_SWAP, pins=True)
            ledger.flash(max(groups) * FP32, GRADIENTS)
        else:
            self._make_masters(groups)
        ledger.pin(part * self._unit, GRADIENT_BUFFER, pins=pins)

    def _make_masters(self, groups: list[int]) -> None:
        ledger = self.ledger
        converted = None
        for size in groups:
            if self._strategy.param_offload is OffloadDevice.NONE:
                self._convert(size)
            fresh = ledger.take(size * FP32, MASTER)
            if converted is not None:
                ledger.drop(converted)
            converted = fresh
            ledger.take(size * FP32, MASTER)
        if converted is not None:
            ledger.drop(converted)
        zeros = ledger.take(max(groups) * FP32, GRADIENTS)
        for size in groups:
            ledger.pin(size * FP32, GRADIENTS, pins=self._pins)
        ledger.drop(zeros)

    def _convert(self, elements: int) -> None:
        """A copy between GPU and host that changes the type takes a buffer of the smaller type on the host.

        Source: torch 2.13, aten/src/ATen/native/cuda/Copy.cu, copy_kernel_cuda.
        """
        if self._unit < FP32:
            self.ledger.flash(elements * self._unit, CONVERTED)

    def _first_backward(self) -> None:
        """At stage 2 an accumulated gradient rests on the host, whole (stage_1_and_2.py:1824)."""
        if self._stage is not ZeroStage.GRADIENTS or self._offload is OffloadDevice.NONE:
            return
        if self._accumulates:
            for position in self._group.held_by(self._rank):
                size = self._sizes[self._trained[position]] * self._unit
                self.ledger.pin(size, GRADIENT_BUFFER, pins=self._pins)

    def _first_step(self) -> None:
        """DeepSpeedCPUAdam makes two pageable states (ops/adam/cpu_adam.py:161).

        Pages of bitsandbytes' are all counted here, though the GPU holds those that it has room for.
        """
        if self._offload is OffloadDevice.NONE:
            self.ledger.take(self._page_bytes, STATES)
        if self._offload is not OffloadDevice.CPU:
            return
        if self._stage is ZeroStage.PARAMETERS:
            groups = [self._parts[number] for number in self._trained]
            for size in sub_groups(groups, self._strategy.buckets.sub_group_size):
                self._make_states(size)
                if self._strategy.param_offload is OffloadDevice.NONE:
                    self._convert(size)
        else:
            self._make_states(self._group.partition_elements)

    @property
    def _page_bytes(self) -> int:
        optimizer = make_optimizer(self._strategy, self._setup.own_optimizer)
        parameters = [self._setup.log.parameters[number] for number in self._trained]
        stepped = [(one.num_elements, one.is_embedding) for one in parameters]
        if self._stage is not ZeroStage.NOTHING:  # flat tensors, embeddings by themselves
            parts = [(-(-size // self._num_ranks), is_embedding) for size, is_embedding in stepped]
            stepped = [(sum(size for size, of in parts if of is kind), kind) for kind in (False, True)]
        return sum(
            optimizer.pages_of(Stepped(num_elements=elements, is_embedding=is_embedding))
            for elements, is_embedding in stepped
        )

    def _make_states(self, elements: int) -> None:
        for _ in range(2):
            self.ledger.take(elements * FP32, STATES)

    def _save(self) -> None:
        """The weights come to the host; each rank's states on the GPU pass through it one at a time."""
        if self._offload is OffloadDevice.NONE:
            states = self._group.partition_elements if self._stage is not ZeroStage.NOTHING else 0
            self.ledger.flash(states * FP32, STATES)
        self.ledger.flash(sum(self._sizes[n] * self._bytes[n] for n in self._saved), SAVED)

    @property
    def _saved(self) -> Iterable[int]:
        """The parameters that this rank copies to the host for the file of the weights, as Trainer saves it.

        Below stage 3 DeepSpeed's weights are whole on every rank, and each rank copies all of them, adapters
        or not. Else only rank 0 has a copy, under LoRA of the adapters alone.
        Source: transformers 5.23, trainer.py:4101 (save_model); accelerate 1.15, accelerator.py:4070
        (get_state_dict); deepspeed 0.19.8, checkpoint/utils.py:41 and runtime/engine.py:5631.
        """
        if self._casts and self._stage is not ZeroStage.PARAMETERS:
            return range(len(self._sizes))
        if self._rank != 0:
            return ()
        return self._trained if self._setup.trains_adapters else range(len(self._sizes))
