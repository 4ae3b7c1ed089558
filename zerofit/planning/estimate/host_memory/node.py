"""Host memory of one node: every rank's blocks, pinned and pageable, phase by phase; and space on NVMe."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.strategy import OffloadDevice
from zerofit.core.units import GIB, MIB
from zerofit.planning.estimate.host_memory.ledger import CHECKPOINT, ROUNDING
from zerofit.planning.estimate.host_memory.rank import (
    CAST,
    CONVERTED,
    GRADIENT_BUFFER,
    GRADIENTS,
    MASTER,
    OPTIMIZER_SWAP,
    SAVED,
    STATES,
    WEIGHT_PARTITION,
    WEIGHT_SWAP,
    WEIGHTS,
    HostRank,
)

if TYPE_CHECKING:
    from zerofit.core.facts import Machine, ModelFacts
    from zerofit.planning.estimate.engines.engine import Setup

PROCESS = "Python and libraries"
_PROCESS_BYTES = 450 * MIB
"""Resident memory of a rank after it imported torch 2.13 (CPU build), transformers 5.23 with Trainer,
accelerate 1.15 and deepspeed 0.19.8: 496 MiB measured, 429 MiB where libraries are shared with another."""
_CUDA_BYTES = 1 * GIB
"""ASSUMPTION: what the CUDA driver and libraries add on the host to each rank; not measured."""

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Of the types that a checkpoint says."""
_STAGE12 = "deepspeed 0.19.8, runtime/zero/stage_1_and_2.py"
_STAGE3 = "deepspeed 0.19.8, runtime/zero/stage3.py"

_EXPLANATIONS = {
    WEIGHTS: (
        "c P_all a rank where the script loads another type than the checkpoint's, until they are on the GPU",
        "measured: a private copy appears only where from_pretrained changes the type (transformers 5.23)",
    ),
    CAST: ("c P_all a rank, cast from what was loaded", "deepspeed 0.19.8, runtime/engine.py:1862"),
    CHECKPOINT: (
        "b P_all once a node, b bytes an element as saved, or as much as there is room: mapped files, shared"
        " by the ranks, whose pages the kernel drops where it needs them",
        "measured: /proc/PID/smaps_rollup of two ranks, tests/evidence/memory/test_checkpoint_load.py;"
        " transformers 5.23, modeling_utils.py:4524, :4573",
    ),
    MASTER: ("4 P / N a rank; 8 P / N while stage 3 makes it", f"{_STAGE12}:565; {_STAGE3}:1159"),
    STATES: (
        "8 P / N a rank with the optimizer on the host, or the pages of a paged one; else one state on its"
        " way to the disk",
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
    ROUNDING: (
        "pinned blocks rounded up to a power of two, and those that are kept for the next use",
        "torch 2.13, aten/src/ATen/core/CachingHostAllocator.h:305",
    ),
}


def estimate_host_memory(setup: Setup, *, model: ModelFacts, machine: Machine) -> MemoryEstimate:
    """Return what one node's host needs, all its ranks together, phase by phase: the node that has rank 0.

    Dataset, DataLoader workers and the page cache of other files are not in it. Weights are taken to come
    from safetensors files on a local disk.

    Args:
        setup: what runs.
        model: tells the type of the weights in the checkpoint; fp32 where it does not.
        machine: the node.
    """
    loaded = ELEMENT_BYTES.get(model.checkpoint_dtype, 4)
    on_gpu = bool(machine.gpus) and not setup.topology.on_cpu
    totals: dict[RunPhase, Counter[tuple[str, Holder]]] = {}
    for rank in range(setup.topology.ranks_per_node):
        played = HostRank(setup, rank=rank, loaded_bytes_per_element=loaded).play()
        for phase, held in played.largest.items():
            totals.setdefault(phase, Counter()).update(held)
    process = process_term(setup.topology.ranks_per_node, on_gpu=on_gpu)
    for held in totals.values():
        _leave_room(held, machine.host_memory_available_bytes - process.num_bytes)
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


def nvme_bytes_needed(setup: Setup) -> int:
    """Return the space that one node's ranks fill on NVMe.

    An offloaded optimizer keeps master, two states and the gradient there, 16 bytes an element; offloaded
    weights their own bytes. Source: deepspeed 0.19.8, runtime/swap_tensor/optimizer_utils.py and
    partitioned_param_swapper.py.
    """
    strategy, log, topology = setup.strategy, setup.log, setup.topology
    num_bytes = 0
    for parameter in log.parameters:
        part = -(-parameter.num_elements // topology.data_parallel_size)
        if strategy.optimizer_offload is OffloadDevice.NVME and parameter.trains and setup.trains:
            num_bytes += 16 * part
        if strategy.param_offload is OffloadDevice.NVME:
            num_bytes += parameter.bytes_per_element * part
    return num_bytes * topology.ranks_per_node


def _leave_room(held: Counter[tuple[str, Holder]], room: int) -> None:
    """Cut the mapped checkpoint to what the rest leaves: its pages can be read from the disk again."""
    key = CHECKPOINT, Holder.PAGEABLE
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
    """Return what the ranks of a node and their launcher hold before they have a tensor."""
    each = _PROCESS_BYTES + (_CUDA_BYTES if on_gpu else 0)
    return Term(
        name=PROCESS,
        num_bytes=num_ranks * each + _PROCESS_BYTES,
        holder=Holder.PAGEABLE,
        formula="ranks x (imported libraries + CUDA's own) + the launcher",
        source="measured: a rank's memory after its imports, CPU build; ASSUMPTION: 1 GiB a rank for CUDA",
    )
