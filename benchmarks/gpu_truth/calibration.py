"""Catalog entries from the measurements of one machine: its GPU's context, and achieved rates."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.core.rates import Basis, Rate, RateName, Unit
from zerofit.core.units import MIB
from zerofit.machine.gpu_catalog import catalog_gpu
from zerofit.planning.estimate.device_memory.non_torch_memory import context_term, cublas_workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from measuring.results import TrialMeasurement

    from gpu_truth.results import CaseResult, Results
    from zerofit.machine.gpu_catalog import CatalogGpu

_MODEL_SHAPES = 0.8
"""Of the best shape's rate, what a model's shapes reach. ASSUMPTION: a fifth less, as in every rate of
zerofit/catalog/rates.toml for 16 bit; what is measured is one large square product. The marked cases in fp32,
BERT-large and ViT on an H200, took 1.4 times as long as by the square's rate."""
_OF_A_SQUARE = frozenset({RateName.MATMUL_16BIT, RateName.MATMUL_FP32})
_PEAKS = {
    RateName.MATMUL_16BIT: "bf16_flops_per_s",
    RateName.MATMUL_FP32: "fp32_flops_per_s",
    RateName.DEVICE_MEMORY: "memory_bytes_per_s",
    RateName.PEER_LINK: "peer_bytes_per_s",
}
"""The peak of GpuSpec that a rate is a fraction of. A rate that is not here is its host's, and no other's:
copies too, which go through the host's PCIe slots, switches and memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogFacts:
    """What belongs into the catalog, and what was found on the way."""

    gpu: CatalogGpu
    """The entry as it is now."""
    context_mib: int | None
    """What a training process holds of this GPU beside torch's memory; None where nothing says it."""
    context_source: str
    rates: tuple[Rate, ...]
    """Achieved fractions of the GPU's peaks, each for this GPU only."""
    defects: tuple[str, ...]
    """What the estimator or a peak of the catalog says otherwise: to be mended there, not fitted here."""
    left_out: tuple[str, ...]
    """What was measured or tried and does not go into the catalog, each with its reason."""

    @property
    def present_context_mib(self) -> int:
        """What the estimator counts now."""
        return round(context_term(self.gpu.spec).num_bytes / MIB)


def catalog_facts(results: Results, *, gpus: tuple[CatalogGpu, ...], cited_as: str) -> CatalogFacts:
    """Return what a machine's measurements say for the catalog.

    Args:
        results: of one machine with a GPU.
        gpus: the catalog's.
        cited_as: how a source names their file, such as "benchmarks/measured/nvidia-h200.json".

    Raises:
        UserError: they are of a GPU that the catalog does not have, or of the CPU.
    """
    machine = results.machine
    gpu = catalog_gpu(machine.device, machine.memory_bytes, gpus=gpus)
    if gpu is None or gpu.spec.compute_capability is None:
        raise UserError(
            "not-in-gpu-catalog",
            "there is no entry of the catalog that these measurements belong to",
            found=f"measured on {machine.device} with {machine.memory_bytes // MIB} MiB   ({cited_as})",
            why="fractions are of the peaks in zerofit/catalog/gpus.toml, and a context is one GPU's own",
            fix="add the GPU to zerofit/catalog/gpus.toml under this name; on the CPU nothing is calibrated",
        )
    source = f"measured: {cited_as}, {results.date[:10]}, torch {results.versions.torch}"
    context_bytes, context_how = _context(results)
    rates, faster, left_out = _rates(results, gpu, source=source)
    return CatalogFacts(
        gpu=gpu,
        context_mib=None if context_bytes is None else round(context_bytes / MIB),
        context_source=f"{source}, {context_how}",
        rates=rates,
        defects=(*_workspace_defects(results, gpu.spec.compute_capability), *faster),
        left_out=left_out,
    )


def _context(results: Results) -> tuple[int | None, str]:
    """Return the bytes and how they were measured: in the runs to calibrate by, else in the small program."""
    beside_torch = [
        num_bytes for result in results.accuracy if (num_bytes := _beside_torch(result)) is not None
    ]
    if beside_torch:
        least, most = (round(value / MIB) for value in (min(beside_torch), max(beside_torch)))
        how = f"median of {len(beside_torch)} training runs, {least} to {most} MiB"
        return int(statistics.median(beside_torch)), how
    if results.context is not None:
        return results.context.with_kernels_bytes, "training step of a small transformer"
    return None, ""


def _beside_torch(result: CaseResult) -> int | None:
    """Return what the driver counted beyond torch's memory in a run that may calibrate; None for others."""
    measured: TrialMeasurement | None = result.outcome.measured
    if not result.case.calibrates or measured is None:
        return None
    if measured.device_bytes is None or measured.reserved_bytes is None:
        return None
    return measured.device_bytes - measured.reserved_bytes


def _rates(
    results: Results, gpu: CatalogGpu, *, source: str
) -> tuple[tuple[Rate, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the achieved fractions, those that are above one, and what is left out."""
    found: list[Rate] = []
    too_fast: list[str] = []
    left_out: list[str] = []
    if results.calibration is None:
        return (), (), ("all rates: no calibration was measured",)
    for measured in results.calibration.rates:
        peak = getattr(gpu.spec, _PEAKS[measured.name]) if measured.name in _PEAKS else None
        if measured.name is RateName.MATMUL_16BIT:
            peak = peak or gpu.spec.fp16_flops_per_s  # a GPU without bf16 is measured in fp16
        if peak is None:
            left_out.append(f"{measured.name}: of this host, for zerofit doctor --calibrate on each")
        elif measured.value >= peak:
            too_fast.append(f"{measured.name}: {measured.value:.4g} {measured.unit}, peak {peak:.4g}")
        else:
            found.append(_fraction(measured, peak, gpu, source=source))
    above = tuple(f"{text} of {gpu.spec.name} in gpus.toml: that peak is too low" for text in too_fast)
    return tuple(found), above, (*left_out, *results.calibration.left_out)


def _fraction(measured: Rate, peak: float, gpu: CatalogGpu, *, source: str) -> Rate:
    """Return an achieved rate as a fraction that holds for this GPU and no other."""
    achieved = measured.value / peak
    is_derived = measured.name in _OF_A_SQUARE
    share = f"{achieved:.1%} of the peak of {gpu.spec.name}, {measured.source}"
    return Rate(
        name=measured.name,
        value=round(achieved * _MODEL_SHAPES if is_derived else achieved, 3),
        unit=Unit.FRACTION,
        basis=Basis.ASSUMPTION if is_derived else Basis.PUBLISHED,
        source=f"{source}: {share}{', less a fifth' if is_derived else ''}",
        gpus=gpu.driver_names,
    )


def _workspace_defects(results: Results, capability: tuple[int, int]) -> Iterator[str]:
    """Yield each workspace of cuBLAS that is not as large as the estimator says."""
    if results.context is None:
        return
    counted = cublas_workspace_bytes(capability)
    for what, found, expected in (
        ("the first product", results.context.cublas_workspace_bytes, counted),
        ("the first product with a bias", results.context.cublaslt_workspace_bytes, 0),
        ("the first backward pass", results.context.backward_workspace_bytes, counted),
    ):
        if found != expected:
            yield (
                f"{what} takes a workspace of {found} bytes, {expected} are counted: "
                "see cublas_workspace_bytes() in zerofit/planning/estimate/device_memory/non_torch_memory.py"
            )
