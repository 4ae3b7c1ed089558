"""Host memory of one node as a run loads, trains and saves, pinned and pageable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import CostKind, Pass
from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.strategy import NVME, Engine, OffloadDevice, StateDictType, ZeroStage
from zerofit.core.units import GIB, MIB
from zerofit.planning.estimate.device_memory.optimizers import Stepped
from zerofit.planning.estimate.engines.engine import bucket_sizes
from zerofit.planning.estimate.engines.zero_engine import FP32, FlatGroup, flattens_on_gpu
from zerofit.planning.estimate.host_ledger import CHECKPOINT, ROUNDING, HostLedger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.allocation_log import AllocationLog, OperatorCost
    from zerofit.core.facts import Machine, ModelFacts
    from zerofit.planning.estimate.engines.engine import Setup

WEIGHTS, CAST = "weights", "cast weights"
CONVERTED = "conversion buffer"
MASTER, STATES, GRADIENTS = "master weights", "optimizer states", "gradient partition"
WEIGHT_PARTITION, GRADIENT_BUFFER = "offloaded weights", "gradient buffer"
OPTIMIZER_SWAP, WEIGHT_SWAP = "optimizer swap buffers", "weight swap buffers"
SAVED = "saved weights"
ACTIVATIONS = "offloaded activations"


def host_copies(log: AllocationLog) -> list[OperatorCost]:
    """Return a micro-batch's copies of saved tensors to the host."""
    return [cost for cost in log.costs if cost.kind is CostKind.HOST_COPY and cost.during is Pass.FORWARD]


class HostRank:
    """One rank of a run, played on a HostLedger."""

    def __init__(self, setup: Setup, *, rank: int, loaded_bytes_per_element: int) -> None:
        """Make the rank.

        Args:
            loaded_bytes_per_element: of the weights in the checkpoint, or as the script initialises them.
        """
        self.ledger = HostLedger()
        strategy, log = setup.strategy, setup.log
        self._setup, self._strategy, self._rank = setup, strategy, rank
        self._num_ranks = setup.topology.num_replicas
        self._sizes = [parameter.num_elements for parameter in log.parameters]
        self._made = [parameter.bytes_per_element for parameter in log.parameters]
        self._bytes = [shard.bytes_per_element for shard in log.shards] or self._made
        self._trained = setup.trained
        self._unit = setup.unit
        self._is_deepspeed = strategy.engine is Engine.DEEPSPEED
        self._is_sharded = strategy.engine is Engine.FSDP2
        shard_size = setup.topology.dp_shard_size
        self._shards = [shard.num_elements for shard in log.shards] or [
            -(-size // shard_size) for size in self._sizes
        ]
        self._stage = strategy.zero_stage if self._is_deepspeed else ZeroStage.NOTHING
        self._loaded = loaded_bytes_per_element
        self._is_partitioned = self._stage is ZeroStage.PARAMETERS and not setup.use.makes_model_first
        self._offload = strategy.optimizer_offload if self._trained else OffloadDevice.NONE
        self._pins = strategy.pin_memory
        self._parts = [-(-size // self._num_ranks) for size in self._sizes]
        self._cut: list[int] = []
        self._weights: list[int] = []
        self._checkpoint: list[int] = []
        self._own_parts: dict[int, int] = {}

    @property
    def accumulates_own_gradients(self) -> bool:
        """True if whole gradients accumulate on the host, which are others on each rank.

        Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py:1824.
        """
        is_offloaded = self._stage is ZeroStage.GRADIENTS and self._offload is not OffloadDevice.NONE
        return is_offloaded and self._setup.num_micro_batches > 1

    def play(self) -> HostLedger:
        """Play the run and return its ledger."""
        ledger = self.ledger
        ledger.begin(RunPhase.LOAD)
        self._load()
        ledger.begin(RunPhase.INITIALISE)
        self._initialise()
        ledger.begin(RunPhase.FORWARD)
        if self._trained:
            activations = self._offload_activations()
            ledger.begin(RunPhase.BACKWARD)
            self._first_backward()
            self._drop(activations)
            ledger.begin(RunPhase.STEP)
            self._first_step()
            ledger.begin(RunPhase.FORWARD)
            activations = self._offload_activations()
            ledger.begin(RunPhase.BACKWARD)
            self._drop(activations)
            ledger.begin(RunPhase.SAVE)
            self._save()
        return ledger

    def _offload_activations(self) -> list[int]:
        """Allocate a pinned block for each saved tensor that waits on the host, and return the blocks."""
        setup, in_flight = self._setup, 1
        if setup.stage is not None:
            in_flight = setup.stage.in_flight(self._strategy)
        return [
            self.ledger.take(
                cost.fixed_bytes + cost.bytes_per_sample * setup.micro_batch_size, ACTIVATIONS, is_pinned=True
            )
            for cost in host_copies(setup.log)
            for _ in range(cost.count * in_flight)
        ]

    def _drop(self, blocks: list[int]) -> None:
        for block in blocks:
            self.ledger.drop(block)

    def _load(self) -> None:
        """from_pretrained maps the checkpoint; a tensor is copied if its dtype changes.

        All ranks share the file's pages, which count for rank 0. Under zero.Init only rank 0 reads them.
        Under FSDP2 each rank has its own 4-bit base, also with cpu_ram_efficient_loading: transformers 5.23
        spares the other ranks only what a checkpoint lacks (modeling_utils.py,
        _move_missing_keys_from_meta_to_device), and accelerate 1.15 broadcasts no 4-bit weights
        (utils/fsdp_utils.py, fsdp2_prepare_model).
        """
        if self._is_partitioned:
            self._partition_weights()
        if self._setup.use.loads_weights and self._rank == 0:
            elements = sum(self._sizes) + self._setup.cut_elements
            self._checkpoint = [self.ledger.take(elements * self._loaded, CHECKPOINT)]
        if self._is_partitioned:
            self._close_checkpoint()
            return
        packed = [parameter.is_packed for parameter in self._setup.log.parameters]
        for number, size in enumerate(self._sizes):
            is_mapped = self._setup.use.loads_weights and self._loaded_bytes_of(number) == self._loaded
            num_bytes = 0 if is_mapped and not packed[number] else size * self._loaded_bytes_of(number)
            self._weights.append(self.ledger.take(num_bytes, WEIGHTS))
        if not self._setup.use.loads_weights:
            self._cut = [self.ledger.take(self._setup.cut_elements * self._loaded, WEIGHTS)]

    def _loaded_bytes_of(self, number: int) -> int:
        """Return the bytes per element of a weight on the host before the engine is made.

        DeepSpeed casts the weights; without it the script loads them in the dtype of the forward pass.
        Under FSDP2 accelerate casts those that train to fp32 before it shards them. 4-bit weights are packed
        while they are loaded, and nobody casts them.
        """
        is_cast = self._is_deepspeed and not self._setup.log.parameters[number].is_packed
        return self._loaded if is_cast else self._made[number]

    def _close_checkpoint(self) -> None:
        self._drop(self._checkpoint)
        self._checkpoint = []

    def _partition_weights(self) -> None:
        if self._strategy.param_offload is OffloadDevice.NVME:
            size = NVME.weight_buffer_count * NVME.weight_buffer_size * self._unit
            self.ledger.pin(size, WEIGHT_SWAP, pins=True)
        elif self._strategy.param_offload is OffloadDevice.CPU:
            for number, part in enumerate(self._parts):
                size = part * self._bytes[number]
                self._own_parts[number] = self.ledger.pin(size, WEIGHT_PARTITION, pins=self._pins)

    def _initialise(self) -> None:
        """The engine casts the weights on the host, moves them to the GPU, and allocates what it offloads."""
        self._drop(self._cut)  # other ranks have these parts
        if not self._is_partitioned:
            self._cast()
            if self._is_sharded and self._strategy.offloads:
                self._pin_shards()
            self._move()
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

    def _pin_shards(self) -> None:
        """Offloaded shards of FSDP2 are made while a state dict still holds the whole weights.

        Source: accelerate 1.15, utils/fsdp_utils.py, original_sd in fsdp2_prepare_model.
        """
        for size, width in zip(self._shards, self._bytes, strict=True):
            self.ledger.pin(size * width, WEIGHT_PARTITION, pins=True)

    def _cast(self) -> None:
        for number, size in enumerate(self._sizes):
            if self._bytes[number] != self._loaded_bytes_of(number):
                cast = self.ledger.take(size * self._bytes[number], CAST)
                self.ledger.drop(self._weights[number])
                self._weights[number] = cast

    def _move(self) -> None:
        self._drop(self._weights)
        self._weights = []
        self._close_checkpoint()

    def _flatten(self) -> None:
        """If the GPU lacks memory, the flat buffer is made on the host, beside a copy of the weights."""
        group = self._group
        if flattens_on_gpu(self._setup, group.padded_elements * self._unit):
            return
        copies = self.ledger.take(group.num_elements * self._unit, WEIGHTS)
        self.ledger.scratch(group.padded_elements * self._unit, WEIGHTS)
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

    @cached_property
    def _sub_groups(self) -> list[int]:
        parts = [self._parts[number] for number in self._trained]
        return bucket_sizes(parts, (self._strategy.buckets.sub_group_size,))

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
            ledger.scratch(part * self._unit, WEIGHT_PARTITION)
        if self._offload is OffloadDevice.NONE:
            return
        groups = self._sub_groups
        if self._offload is OffloadDevice.NVME:
            for _ in range(NVME.optimizer_buffer_count):
                ledger.pin(max(groups) * FP32, OPTIMIZER_SWAP, pins=True)
            ledger.scratch(max(groups) * FP32, GRADIENTS)
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
        """A copy between GPU and host that changes the dtype takes a buffer of the smaller one on the host.

        Source: torch 2.13, aten/src/ATen/native/cuda/Copy.cu, copy_kernel_cuda.
        """
        if self._unit < FP32:
            self.ledger.scratch(elements * self._unit, CONVERTED)

    def _first_backward(self) -> None:
        """Gradients accumulate on the host: under FSDP2 those of shards, at stage 2 whole ones."""
        if self._is_sharded and self._offload is OffloadDevice.CPU:
            for number in self._trained:
                self.ledger.pin(self._shards[number] * self._bytes[number], GRADIENTS, pins=True)
            return
        if self.accumulates_own_gradients:
            for position in self._group.held_by(self._rank):
                size = self._sizes[self._trained[position]] * self._unit
                self.ledger.pin(size, GRADIENT_BUFFER, pins=self._pins)

    def _first_step(self) -> None:
        """DeepSpeedCPUAdam makes two pageable states (ops/adam/cpu_adam.py:161).

        All pages of bitsandbytes' paged optimizers count here, though the GPU holds as many as fit.
        """
        if self._offload is OffloadDevice.NONE:
            self.ledger.take(self._page_bytes, STATES)
        if self._offload is not OffloadDevice.CPU:
            return
        if self._is_sharded:
            self._make_states(self._stepped_elements)
        elif self._stage is ZeroStage.PARAMETERS:
            for size in self._sub_groups:
                self._make_states(size)
                if self._strategy.param_offload is OffloadDevice.NONE:
                    self._convert(size)
        else:
            self._make_states(self._group.partition_elements)

    @property
    def _page_bytes(self) -> int:
        optimizer = self._setup.optimizer
        parameters = [self._setup.log.parameters[number] for number in self._trained]
        stepped = [(parameter.num_elements, parameter.is_embedding) for parameter in parameters]
        if self._stage is not ZeroStage.NOTHING:  # flat tensors, embeddings by themselves
            parts = [(-(-size // self._num_ranks), is_embedding) for size, is_embedding in stepped]
            stepped = [(sum(size for size, of in parts if of is kind), kind) for kind in (False, True)]
        return sum(
            optimizer.host_bytes_of(Stepped(num_elements=elements, is_embedding=is_embedding))
            for elements, is_embedding in stepped
        )

    @property
    def _stepped_elements(self) -> int:
        """Elements of the shards that this rank steps under FSDP2."""
        return sum(self._shards[number] for number in self._trained)

    def _make_states(self, elements: int) -> None:
        for _ in range(2):
            self.ledger.take(elements * FP32, STATES)

    def _save(self) -> None:
        """The weights are copied to the host, as are each rank's states on the GPU, one at a time.

        Rank 0 of a pipeline gathers both of all stages (training/pipeline/whole_state.py).
        """
        if self._setup.stage is not None and self._rank == 0:
            whole = sum(self._sizes) + self._setup.cut_elements
            states = self.ledger.take(2 * whole * FP32, STATES)
            self.ledger.scratch(whole * max(self._bytes, default=FP32), SAVED)
            self.ledger.drop(states)
            return
        if self._is_sharded:
            self._save_sharded()
            return
        if self._offload is OffloadDevice.NONE:
            states = self._group.partition_elements if self._stage is not ZeroStage.NOTHING else 0
            self.ledger.scratch(states * FP32, STATES)
        self.ledger.scratch(sum(self._sizes[n] * self._bytes[n] for n in self._saved), SAVED)

    def _save_sharded(self) -> None:
        """FSDP2: rank 0 gathers whole weights, then whole states; or each rank copies its shards.

        Source: accelerate/utils/fsdp_utils.py, save_fsdp_model and save_fsdp_optimizer.
        """
        if self._strategy.state_dict_type is StateDictType.FULL:
            if self._rank == 0:
                self.ledger.scratch(sum(map(math.prod, zip(self._sizes, self._bytes, strict=True))), SAVED)
                self.ledger.scratch(2 * FP32 * sum(self._sizes[n] for n in self._trained), STATES)
            return
        if self._offload is OffloadDevice.NONE:
            self.ledger.scratch(sum(map(math.prod, zip(self._shards, self._bytes, strict=True))), SAVED)
            self.ledger.scratch(2 * FP32 * self._stepped_elements, STATES)

    @property
    def _saved(self) -> Iterable[int]:
        """The parameters that this rank copies to the host for the weights file, as Trainer saves it.

        Below stage 3 DeepSpeed's weights are whole on every rank, and each rank copies all of them, with LoRA
        too. Else only rank 0 makes a copy, with LoRA of the adapters alone.
        Source: transformers 5.23, trainer.py:4101 (save_model); accelerate 1.15, accelerator.py:4070
        (get_state_dict); deepspeed 0.19.8, checkpoint/utils.py:41 and runtime/engine.py:5631.
        """
        if self._is_deepspeed and self._stage is not ZeroStage.PARAMETERS:
            return range(len(self._sizes))
        if self._rank != 0:
            return ()
        return self._trained if self._setup.trains_adapters else range(len(self._sizes))


PROCESS = "Python and libraries"
_PROCESS_BYTES = 450 * MIB
"""Resident memory of a rank after it imported torch 2.13 (CPU build), transformers 5.23 with Trainer,
accelerate 1.15 and deepspeed 0.19.8: 496 MiB measured, 429 MiB where libraries are shared with another."""
_CUDA_BYTES = 1 * GIB
"""ASSUMPTION, not measured: host memory of the CUDA driver and libraries per rank."""

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""By the dtype of a checkpoint."""
_STAGE12 = "deepspeed 0.19.8, runtime/zero/stage_1_and_2.py"
_STAGE3 = "deepspeed 0.19.8, runtime/zero/stage3.py"

_EXPLANATIONS = {
    WEIGHTS: (
        "c P_all a rank if the script loads another dtype than the checkpoint's, until they are on the GPU",
        "measured: a private copy appears only where from_pretrained changes the type (transformers 5.23)",
    ),
    CAST: ("c P_all a rank, cast from what was loaded", "deepspeed 0.19.8, runtime/engine.py:1862"),
    CHECKPOINT: (
        "not counted, as the kernel reclaims pages of mapped files under memory pressure: b P_all once per"
        " node, b bytes per element as saved, or the memory left; the ranks share them",
        "measured: /proc/PID/smaps_rollup of two ranks, tests/evidence/memory/test_checkpoint_load.py;"
        " transformers 5.23, modeling_utils.py:4524, :4573",
    ),
    MASTER: ("4 P / N a rank; 8 P / N while stage 3 makes it", f"{_STAGE12}:565; {_STAGE3}:1159"),
    STATES: (
        "8 P / N a rank with the optimizer on the host, or the pages of a paged one; 8 P_all on rank 0 of a"
        " pipeline; else one state on its way to the disk",
        "deepspeed 0.19.8, ops/adam/cpu_adam.py:161; bitsandbytes/optim/optimizer.py, get_state_buffer;"
        " torch.save copies one storage at a time",
    ),
    GRADIENTS: ("4 P / N a rank, fp32 gradients that the host steps on", f"{_STAGE12}:940; {_STAGE3}:1340"),
    GRADIENT_BUFFER: (
        "stages 1 and 2: c times the largest parameter, c P_part if stage 2 accumulates; stage 3: c P / N",
        f"{_STAGE12}:657, :1824; {_STAGE3}:795",
    ),
    WEIGHT_PARTITION: (
        "stages 1 and 2: c P / N on its way to the GPU; stage 3: c P / N where weights are offloaded",
        f"{_STAGE12}:572; {_STAGE3}:906, runtime/zero/utils.py:221",
    ),
    CONVERTED: ("c P / N while a copy to or from the GPU changes the type", "torch 2.13, cuda/Copy.cu"),
    OPTIMIZER_SWAP: (
        "buffer_count x 4 bytes x the largest sub-group",
        "deepspeed 0.19.8, runtime/swap_tensor/optimizer_utils.py:188",
    ),
    WEIGHT_SWAP: (
        "buffer_count x buffer_size x c",
        "deepspeed 0.19.8, runtime/swap_tensor/partitioned_param_swapper.py:124",
    ),
    SAVED: (
        "c P_all on rank 0, under LoRA of the adapters alone; at DeepSpeed's stages 0 to 2 c P_all on every"
        " rank",
        "accelerate 1.15, accelerator.py:4070 (get_state_dict); transformers 5.23, trainer.py:4101",
    ),
    ACTIVATIONS: (
        "inputs of a micro-batch's checkpointed blocks, per rank, or of all in flight in a pipeline; in the"
        " backward pass at most, as each is freed once its block is recomputed",
        "torch 2.13, autograd/graph.py, save_on_cpu",
    ),
    ROUNDING: (
        "pinned blocks rounded up to a power of two, and those that are kept for the next use",
        "torch 2.13, aten/src/ATen/core/CachingHostAllocator.h:305",
    ),
}


def estimate_host_memory(setup: Setup, *, model: ModelFacts, machine: Machine) -> MemoryEstimate:
    """Return the host memory of the node with rank 0, for all its ranks together, phase by phase.

    Dataset, DataLoader workers and the page cache of other files are not included. Weights are assumed to be
    loaded from safetensors files on a local disk.

    Args:
        model: has the dtype of the checkpoint; fp32 if unknown.
    """
    loaded = ELEMENT_BYTES.get(model.checkpoint_dtype, 4)
    on_gpu = bool(machine.gpus) and not setup.topology.on_cpu
    totals: dict[RunPhase, Counter[tuple[str, Holder]]] = {}
    for number, rank in _played_ranks(setup, loaded):
        for phase, held in rank.play().largest.items():
            total = totals.setdefault(phase, Counter())
            for key, num_bytes in held.items():
                total[key] += number * num_bytes
    process = process_term(setup.topology.ranks_per_node, on_gpu=on_gpu)
    for held in totals.values():
        _limit_checkpoint(held, machine.host_memory_available_bytes - process.num_bytes)
    return MemoryEstimate(
        phases=tuple(
            PhaseMemory(phase=phase, terms=(*_terms(totals[phase]), process))
            for phase in RunPhase
            if phase in totals
        ),
        uncertainty=0.15,
        uncertainty_source="ASSUMPTION: tensors agree with measured CPU ranks within 1 %; what CUDA's"
        " libraries and the data pipeline take on the host was not measured",
    )


def _played_ranks(setup: Setup, loaded: int) -> Iterator[tuple[int, HostRank]]:
    """Yield the ranks of a node that are played, and for how many each stands."""
    left = setup.topology.ranks_per_node
    for number in range(left):
        rank = HostRank(setup, rank=number, loaded_bytes_per_element=loaded)
        alike = left - number if number and not rank.accumulates_own_gradients else 1
        yield alike, rank
        if number + alike == left:
            return


def _limit_checkpoint(held: Counter[tuple[str, Holder]], room: int) -> None:
    """Limit the mapped checkpoint to the memory left, as its pages can be read from the disk again."""
    key = CHECKPOINT, Holder.MAPPED
    if key in held:
        held[key] = min(held[key], max(0, room - held.total() + held[key]))


def _terms(held: Counter[tuple[str, Holder]]) -> tuple[Term, ...]:
    return tuple(
        Term(
            name=name,
            num_bytes=num_bytes,
            holder=holder,
            formula=_EXPLANATIONS[name][0],
            source=_EXPLANATIONS[name][1],
        )
        for (name, holder), num_bytes in held.most_common()
        if num_bytes
    )


def process_term(num_ranks: int, *, on_gpu: bool) -> Term:
    """Return the memory of a node's processes, ranks and launcher, without tensors."""
    each = _PROCESS_BYTES + (_CUDA_BYTES if on_gpu else 0)
    return Term(
        name=PROCESS,
        num_bytes=num_ranks * each + _PROCESS_BYTES,
        holder=Holder.PAGEABLE,
        formula="ranks x (imported libraries + CUDA's own) + the launcher",
        source="measured: a rank's memory after its imports, CPU build; ASSUMPTION: 1 GiB a rank for CUDA",
    )
