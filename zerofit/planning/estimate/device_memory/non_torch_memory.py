"""Memory outside the allocation log: CUDA context, NCCL, cuBLAS, a script's other models, with sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder, Term
from zerofit.core.units import KIB, MIB

if TYPE_CHECKING:
    from zerofit.core.facts import GpuSpec, Versions
    from zerofit.core.plan import Topology

OTHER_MODELS = "other models of the script"
NCCL = "NCCL"

_LAZY = "https://github.com/pytorch/pytorch/issues/109888: about 400 MB since CUDA 11.7 loads kernels lazily"

_CONTEXTS = (
    (
        (10, 0),
        616,
        "https://github.com/LMCache/LMCache/issues/4019: 616 MiB, on an unnamed GPU",
    ),
    ((9, 0), 520, f"ASSUMPTION: between 426 MiB (compute capability 8.9) and 616 MiB; {_LAZY}"),
    ((8, 9), 426, "https://github.com/unslothai/unsloth-zoo/pull/1053: RTX 6000 Ada, torch 2.10, CUDA 13.0"),
    ((8, 6), 256, "https://github.com/invoke-ai/InvokeAI/issues/9413: RTX 3090, torch 2.7.1, CUDA 12.8"),
    ((8, 0), 400, _LAZY),
    ((7, 5), 256, "ASSUMPTION: that of compute capability 8.6, as nobody seems to have published one"),
    ((0, 0), 303, "https://github.com/pytorch/pytorch/issues/107667: 300 something MB"),
)
"""(least compute capability, MiB, source): CUDA context of a process that has launched few kernels."""

_KERNELS_MIB = 64
"""ASSUMPTION: kernels of cuBLAS, attention and other operators that a training step loads into the context.
The sources above measured an idle process."""
_EAGER_MIB = 1343
_EAGER = (
    "https://github.com/huggingface/transformers/blob/0ad5fe67b294ea7fccb6bd087b25bb8ffc19ceed/docs/source/"
    "performance.mdx: 1343 MiB, V100; ASSUMPTION: as much on every GPU"
)
_LAZY_SINCE = (1, 13)
"""The first torch that sets CUDA_MODULE_LOADING=LAZY: before it, a context holds all kernels at once.
Source: https://github.com/pytorch/pytorch/pull/86509"""

_NVLINK_MIB, _NVLINK_PAIR_MIB = 688, 544
"""Measured on four A100 with NVLink for a group of more than two ranks, and of two, in 2023:
https://github.com/NVIDIA/nccl/issues/964 (its "MB" is taken for nvidia-smi's MiB). ASSUMPTION: it is as much
now; NCCL has since begun to connect an algorithm only when it is first used, so that it may be less."""
_NVLS_MIB = 16 * 2
"""For each rank of the node: 16 channels, two directions, 8 steps of 128 KiB. From Hopper on, with more than
two GPUs: NVIDIA/nccl src/transport/nvls.cc, ncclNvlsBufferSetup. An older NCCL took 2.4 GB for eight ranks:
https://github.com/vllm-project/vllm/issues/9699"""
_CONNECTION_BYTES = 4_194_304 + 4_915_200 + 524_288
"""The buffers of one connection of a channel for the Simple, LL128 and LL protocols; 9,641,984 bytes seen in
https://github.com/tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark/issues/8"""
_PCIE_CONNECTIONS = 4 * 2
"""ASSUMPTION: without NVLink NCCL sets up four channels, each with a ring and one tree neighbour."""

_LARGE_WORKSPACES = (9, 10, 12)
"""Major compute capabilities to which PyTorch gives 32 MiB: Hopper and Blackwell, without Thor (11)."""


def non_torch_terms(
    gpu: GpuSpec, topology: Topology, versions: Versions, *, other_weight_bytes: int = 0
) -> tuple[Term, ...]:
    """Return the memory of a GPU that no log has: CUDA context, other models, with several ranks NCCL.

    Args:
        other_weight_bytes: of the script's models beside the one that it trains.
    """
    terms = [context_term(gpu, versions=versions)]
    if other_weight_bytes:
        source = (
            "ASSUMPTION: each rank holds them whole, as the script makes them; of their activations, those of"
            " a Trainer's loss are traced"
        )
        terms.append(
            _outside(
                OTHER_MODELS, other_weight_bytes, "weights and buffers of models that are not trained", source
            )
        )
    nccl = nccl_term(gpu, topology)
    return (*terms, nccl) if nccl is not None else tuple(terms)


def context_term(gpu: GpuSpec, *, versions: Versions | None = None) -> Term:
    """Return the CUDA context of a process on this GPU, with the kernels that it loads.

    The GPU's own entry in the catalog takes precedence over the table by generation.

    Args:
        versions: tell whether torch loads kernels lazily, as without them.
    """
    if versions is not None and _loads_all_kernels(versions.torch):
        return _outside("CUDA context", _EAGER_MIB * MIB, f"{_EAGER_MIB} MiB with all kernels", _EAGER)
    if gpu.context_bytes is not None:
        formula = f"{gpu.context_bytes / MIB:g} MiB with its kernels"
        return _outside("CUDA context", gpu.context_bytes, formula, gpu.context_source)
    capability = gpu.compute_capability or (0, 0)
    mib, source = next((mib, source) for least, mib, source in _CONTEXTS if capability >= least)
    formula = f"{mib} MiB + {_KERNELS_MIB} MiB of kernels"
    return _outside("CUDA context", (mib + _KERNELS_MIB) * MIB, formula, source)


def _loads_all_kernels(torch: str | None) -> bool:
    parts = (torch or "").split(".")[:2]
    return all(part.isdigit() for part in parts) and tuple(map(int, parts)) < _LAZY_SINCE


def nccl_term(gpu: GpuSpec, topology: Topology) -> Term | None:
    """Return NCCL's buffers: of the communicator of the ranks that hold the same weights, and of that of the
    ranks that share samples; None without either.
    """
    sizes = [size for size in (topology.num_replicas, topology.sample_group_size) if size > 1]
    if not sizes:
        return None
    found = [_communicator(gpu, size, topology) for size in sizes]
    formula = " + ".join(formula for _, formula, _ in found)
    return _outside(NCCL, sum(num_bytes for num_bytes, _, _ in found), formula, found[0][2])


def _communicator(gpu: GpuSpec, size: int, topology: Topology) -> tuple[int, str, str]:
    """Return the bytes of one communicator, their formula and its source."""
    if not gpu.has_fast_links:
        formula = f"{_PCIE_CONNECTIONS} connections x {_CONNECTION_BYTES} B"
        source = "https://github.com/NVIDIA/nccl/issues/1450; number of connections: ASSUMPTION"
        return _PCIE_CONNECTIONS * _CONNECTION_BYTES, formula, source
    mib = _NVLINK_PAIR_MIB if size == 2 else _NVLINK_MIB
    formula = f"{mib} MiB over NVLink"
    on_node = min(size, topology.ranks_per_node)
    if (gpu.compute_capability or (0, 0)) >= (9, 0) and on_node > 2:
        mib += _NVLS_MIB * on_node
        formula += f" + {_NVLS_MIB} MiB x {on_node} ranks of the node for NVLS"
    source = "https://github.com/NVIDIA/nccl/issues/964; NVIDIA/nccl src/transport/nvls.cc"
    return mib * MIB, formula, source


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Return the workspace of one cuBLAS handle on one stream, which PyTorch's allocator never frees.

    cuBLASLt shares it. A training process has two handles: the main thread's and autograd's.
    Left out: Blackwell had the smaller one until https://github.com/pytorch/pytorch/pull/175344 (2026-02).
    Source: parseChosenWorkspaceSize in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/cuda/CublasHandlePool.cpp
    """
    if compute_capability[0] in _LARGE_WORKSPACES:
        return 8 * 4096 * KIB
    return 2 * 4096 * KIB + 8 * 16 * KIB


def _outside(name: str, num_bytes: int, formula: str, source: str) -> Term:
    return Term(name=name, num_bytes=num_bytes, holder=Holder.OUTSIDE, formula=formula, source=source)
