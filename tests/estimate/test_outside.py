"""What lies outside PyTorch's tensors: contexts, NCCL, cuBLAS."""

from __future__ import annotations

import pytest

from zerofit.estimate.outside import context_term, cublas_workspace_bytes, least_context_bytes, nccl_term
from zerofit.facts import GpuSpec
from zerofit.plan import Topology
from zerofit.units import MIB


def _gpu(capability: tuple[int, int] | None = (8, 0), *, peer_bytes_per_s: float | None = None) -> GpuSpec:
    return GpuSpec(
        name="made",
        memory_bytes=80 * 2**30,
        compute_capability=capability,
        peer_bytes_per_s=peer_bytes_per_s,
    )


@pytest.mark.parametrize(
    ("capability", "mib"),
    [(None, 367), ((7, 0), 367), ((7, 5), 320), ((8, 0), 464), ((8, 6), 320), ((8, 9), 490), ((12, 0), 680)],
)
def test_the_context_follows_the_generation(capability: tuple[int, int] | None, mib: int) -> None:
    assert context_term(_gpu(capability)).num_bytes == mib * MIB
    assert least_context_bytes() <= mib * MIB


def test_a_measured_context_is_taken_as_it_is() -> None:
    assert context_term(_gpu(), context_bytes=1343 * MIB).num_bytes == 1343 * MIB


@pytest.mark.parametrize(
    ("capability", "peer_bytes_per_s", "topology", "num_bytes"),
    [
        pytest.param((8, 0), 300e9, Topology(), None, id="one rank has nobody to talk to"),
        pytest.param((8, 0), 25e9, Topology(world_size=2), 8 * 9_633_792, id="PCIe"),
        pytest.param((8, 0), None, Topology(world_size=8), 8 * 9_633_792, id="a link that is not known"),
        pytest.param((8, 0), 300e9, Topology(world_size=2), 544 * MIB, id="two A100"),
        pytest.param((8, 0), 300e9, Topology(world_size=8), 688 * MIB, id="eight A100"),
        pytest.param((9, 0), 450e9, Topology(world_size=2), 544 * MIB, id="two H100"),
        pytest.param((9, 0), 450e9, Topology(world_size=8), (688 + 256) * MIB, id="eight H100, with NVLS"),
        pytest.param(
            (9, 0), 450e9, Topology(world_size=16, num_nodes=2), (688 + 256) * MIB, id="eight on each node"
        ),
    ],
)
def test_nccl(
    capability: tuple[int, int], peer_bytes_per_s: float | None, topology: Topology, num_bytes: int | None
) -> None:
    term = nccl_term(_gpu(capability, peer_bytes_per_s=peer_bytes_per_s), topology)
    assert (term.num_bytes if term else None) == num_bytes


@pytest.mark.parametrize(
    ("capability", "num_bytes"),
    [((7, 0), 8_519_680), ((8, 9), 8_519_680), ((9, 0), 33_554_432), ((12, 0), 33_554_432)],
)
def test_cublas_workspaces(capability: tuple[int, int], num_bytes: int) -> None:
    assert cublas_workspace_bytes(capability) == num_bytes
