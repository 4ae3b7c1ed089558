"""Memory outside PyTorch's tensors: contexts, NCCL, cuBLAS."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerofit.core.facts import GpuSpec, Versions
from zerofit.core.plan import Topology
from zerofit.core.units import MIB
from zerofit.planning.estimate.device_memory.non_torch_memory import (
    OTHER_MODELS,
    context_term,
    cublas_workspace_bytes,
    nccl_term,
    non_torch_terms,
)


def _gpu(capability: tuple[int, int] | None = (8, 0), *, has_fast_links: bool = False) -> GpuSpec:
    return GpuSpec(
        name="made",
        memory_bytes=80 * 2**30,
        compute_capability=capability,
        has_fast_links=has_fast_links,
        peer_bytes_per_s=64e9,
    )


@pytest.mark.parametrize(
    ("capability", "mib"),
    [(None, 367), ((7, 0), 367), ((7, 5), 320), ((8, 0), 464), ((8, 6), 320), ((8, 9), 490), ((12, 0), 680)],
)
def test_the_context_follows_the_generation(capability: tuple[int, int] | None, mib: int) -> None:
    assert context_term(_gpu(capability)).num_bytes == mib * MIB


@pytest.mark.parametrize(
    ("torch", "mib"),
    [("1.10", 1343), ("1.12.1+cu116", 1343), ("1.13.0", 367), ("2.13.0", 367), ("main", 367), (None, 367)],
)
def test_before_1_13_the_context_holds_all_kernels(torch: str | None, mib: int) -> None:
    versions = Versions(python="3", zerofit="0", torch=torch)
    terms = non_torch_terms(_gpu((7, 0)), Topology(), versions)
    assert [(term.name, term.num_bytes) for term in terms] == [("CUDA context", mib * MIB)]


_MEASURED = replace(_gpu((9, 0)), context_bytes=777 * MIB, context_source="measured: there")


@pytest.mark.parametrize("torch", ["1.13.0", "2.13.0", None])
def test_what_a_gpus_entry_says_goes_before_the_table(torch: str | None) -> None:
    term = context_term(_MEASURED, versions=Versions(python="3", zerofit="0", torch=torch))
    assert (term.num_bytes, term.source) == (777 * MIB, "measured: there")
    assert term.formula == "777 MiB with its kernels"


def test_a_torch_that_loads_all_kernels_goes_before_what_was_measured_without() -> None:
    versions = Versions(python="3", zerofit="0", torch="1.12.1")
    assert context_term(_MEASURED, versions=versions).num_bytes == 1343 * MIB


@pytest.mark.parametrize(("other", "expected"), [(0, []), (5 * MIB, [(OTHER_MODELS, 5 * MIB)])])
def test_other_models_of_a_script_are_a_term_of_their_own(
    other: int, expected: list[tuple[str, int]]
) -> None:
    versions = Versions(python="3", zerofit="0")
    terms = non_torch_terms(_gpu(), Topology(world_size=2), versions, other_weight_bytes=other)
    assert [(term.name, term.num_bytes) for term in terms[1:-1]] == expected
    assert (terms[0].name, terms[-1].name) == ("CUDA context", "NCCL")


@pytest.mark.parametrize(
    ("capability", "has_fast_links", "topology", "num_bytes"),
    [
        pytest.param((8, 0), True, Topology(), None, id="one rank has nobody to talk to"),
        pytest.param((8, 0), False, Topology(world_size=2), 8 * 9_633_792, id="PCIe"),
        pytest.param((8, 0), True, Topology(world_size=2), 544 * MIB, id="two A100"),
        pytest.param((8, 0), True, Topology(world_size=8), 688 * MIB, id="eight A100"),
        pytest.param((9, 0), True, Topology(world_size=2), 544 * MIB, id="two H100"),
        pytest.param((9, 0), True, Topology(world_size=8), (688 + 256) * MIB, id="eight H100, with NVLS"),
        pytest.param(
            (9, 0), True, Topology(world_size=16, num_nodes=2), (688 + 256) * MIB, id="eight on each node"
        ),
    ],
)
def test_nccl(
    capability: tuple[int, int], has_fast_links: bool, topology: Topology, num_bytes: int | None
) -> None:
    term = nccl_term(_gpu(capability, has_fast_links=has_fast_links), topology)
    assert (term.num_bytes if term else None) == num_bytes


@pytest.mark.parametrize(
    ("capability", "num_bytes"),
    [
        ((7, 0), 8_519_680),
        ((8, 9), 8_519_680),
        ((9, 0), 33_554_432),
        ((10, 0), 33_554_432),
        ((11, 0), 8_519_680),
        ((12, 0), 33_554_432),
    ],
)
def test_cublas_workspaces(capability: tuple[int, int], num_bytes: int) -> None:
    assert cublas_workspace_bytes(capability) == num_bytes
