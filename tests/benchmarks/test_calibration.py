"""From a results file to the catalog: blocks, defects, and a write that changes one GPU and nothing else.

All numbers here are made by hand: nothing was measured.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import calibrate
import pytest
from gpu_truth.calibration import CatalogFacts, catalog_facts
from gpu_truth.results import (
    Case,
    CaseResult,
    ContextMeasured,
    MachineRecord,
    Results,
    results_to_json,
)
from kept_cases import measurement
from measuring.results import TrialOutcome, TrialState
from refusals import refusal

from zerofit.core.facts import Versions
from zerofit.core.rates import Basis, Calibration, Rate, RateName, Rates, Unit
from zerofit.core.strategy import Strategy
from zerofit.core.units import GIB, MIB
from zerofit.machine.gpu_catalog import find_gpu, load_gpus, read_gpus
from zerofit.machine.rates import catalog_rates, read_rates
from zerofit.planning.estimate.device_memory.non_torch_memory import context_term, cublas_workspace_bytes

_CATALOG = Path(__file__).parents[2] / "zerofit" / "catalog"
_CITED = "benchmarks/measured/nvidia-h200.json"
_FILES = ("gpus.toml", "rates.toml")
_HOPPER = (9, 0)
_WORKSPACE = cublas_workspace_bytes(_HOPPER)
_CONTEXT = ContextMeasured(
    context_bytes=500 * MIB,
    with_kernels_bytes=561 * MIB,
    cublas_workspace_bytes=_WORKSPACE,
    cublaslt_workspace_bytes=0,
    backward_workspace_bytes=_WORKSPACE,
)


def _case(beside_torch_mib: int, *, calibrates: bool = True) -> CaseResult:
    measured = measurement(reserved_bytes=10 * GIB, device_bytes=10 * GIB + beside_torch_mib * MIB, losses=())
    case = Case(
        key=f"made-{beside_torch_mib}",
        group="made",
        model="gpt2",
        task="causal-lm",
        strategy=Strategy(micro_batch_size=1),
        sequence_length=128,
        calibrates=calibrates,
    )
    return CaseResult(
        case=case,
        outcome=TrialOutcome(state=TrialState.DONE, measured=measured),
        predicted=None,
        took_s=1.0,
        date="2026-01-02T03:04:05+00:00",
    )


def _measured(name: RateName, value: float, unit: Unit) -> Rate:
    return Rate(name=name, value=value, unit=unit, basis=Basis.MEASURED, source="how it was")


_RESULTS = Results(
    machine=MachineRecord(
        device="NVIDIA H200",
        memory_bytes=round(139.8 * GIB),
        compute_capability=_HOPPER,
        driver="580.1",
        num_cpu_cores=16,
        cpu="made",
        host_memory_bytes=128 * GIB,
    ),
    versions=Versions(python="3.12.1", zerofit="0.1.0", torch="2.11.0+cu130"),
    date="2026-01-02T03:04:05+00:00",
    context=_CONTEXT,
    calibration=Calibration(
        rates=(
            _measured(RateName.MATMUL_16BIT, 742.05e12, Unit.FLOPS_PER_S),
            _measured(RateName.MATMUL_FP32, 53.52e12, Unit.FLOPS_PER_S),
            _measured(RateName.DEVICE_MEMORY, 4.32e12, Unit.BYTES_PER_S),
            _measured(RateName.PINNED_COPY, 56.7e9, Unit.BYTES_PER_S),
            _measured(RateName.DISPATCH, 1e-5, Unit.SECONDS),
            _measured(RateName.HOST_MEMORY, 2e11, Unit.BYTES_PER_S),
        ),
        left_out=("all-reduce: there is one GPU",),
    ),
)
"""Made by hand, of a GPU that the catalog has."""


def _facts(results: Results) -> CatalogFacts:
    return catalog_facts(results, gpus=load_gpus(), cited_as=_CITED)


def test_the_context_is_that_of_the_small_program_where_no_run_calibrates() -> None:
    facts = _facts(replace(_RESULTS, accuracy=(_case(700, calibrates=False),)))
    assert facts.context_mib == 561
    assert facts.context_source == (
        "measured: benchmarks/measured/nvidia-h200.json, 2026-01-02, torch 2.11.0+cu130, "
        "training step of a small transformer"
    )


def test_the_context_is_the_median_of_the_runs_that_calibrate() -> None:
    accuracy = (_case(570), _case(590), _case(640), _case(9000, calibrates=False))
    facts = _facts(replace(_RESULTS, accuracy=accuracy))
    assert facts.context_mib == 590
    assert facts.context_source.endswith(", median of 3 training runs, 570 to 640 MiB")


def test_fractions_are_of_the_gpus_peaks_and_for_it_only() -> None:
    facts = _facts(_RESULTS)
    assert {rate.name: (rate.value, rate.basis) for rate in facts.rates} == {
        RateName.MATMUL_16BIT: (0.6, Basis.ASSUMPTION),  # 75 %, less a fifth
        RateName.MATMUL_FP32: (0.64, Basis.ASSUMPTION),  # 80 %, less a fifth
        RateName.DEVICE_MEMORY: (0.9, Basis.PUBLISHED),
    }
    for rate in facts.rates:
        assert rate.unit is Unit.FRACTION
        assert (rate.gpus, rate.least_compute_capability) == (("NVIDIA H200",), (0, 0))
        assert rate.source.startswith(f"measured: {_CITED}, 2026-01-02, torch 2.11.0+cu130: ")
    assert facts.left_out == (
        "copy from and to pinned memory: of this host, for zerofit doctor --calibrate on each",
        "dispatch of an operator: of this host, for zerofit doctor --calibrate on each",
        "host memory: of this host, for zerofit doctor --calibrate on each",
        "all-reduce: there is one GPU",
    )


@pytest.mark.parametrize(
    ("changed", "found", "expected", "what"),
    [
        ({"cublas_workspace_bytes": 8_519_680}, 8_519_680, _WORKSPACE, "the first product"),
        ({"cublaslt_workspace_bytes": MIB}, MIB, 0, "the first product with a bias"),
        ({"backward_workspace_bytes": 0}, 0, _WORKSPACE, "the first backward pass"),
    ],
)
def test_a_workspace_of_another_size_is_a_defect_and_no_fact(
    changed: dict[str, int], found: int, expected: int, what: str
) -> None:
    facts = _facts(replace(_RESULTS, context=replace(_CONTEXT, **changed)))
    assert facts.defects == (
        f"{what} takes a workspace of {found} bytes, {expected} are counted: "
        "see cublas_workspace_bytes() in zerofit/planning/estimate/device_memory/non_torch_memory.py",
    )
    assert facts.context_mib == 561


@pytest.mark.parametrize(("device", "gib"), [("CPU", 128), ("NVIDIA X900", 80), ("NVIDIA H200", 20)])
def test_what_is_of_no_entry_is_refused(device: str, gib: int) -> None:
    machine = replace(_RESULTS.machine, device=device, memory_bytes=gib * GIB)
    assert str(refusal(_facts, replace(_RESULTS, machine=machine))) == (
        "error[not-in-gpu-catalog]: there is no entry of the catalog that these measurements belong to\n"
        f"  found: measured on {device} with {gib * 1024} MiB   ({_CITED})\n"
        "  why:   fractions are of the peaks in zerofit/catalog/gpus.toml, and a context is one GPU's own\n"
        "  fix:   add the GPU to zerofit/catalog/gpus.toml under this name; on the CPU nothing is calibrated"
    )


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    """Return a copy of the catalog's files."""
    for name in _FILES:
        shutil.copy(_CATALOG / name, tmp_path / name)
    return tmp_path


def _run(folder: Path, results: Results, *flags: str) -> int:
    file = folder / "made.json"
    file.write_text(results_to_json(results), encoding="utf-8")
    return calibrate.main([str(file), "--catalog", str(folder), *flags])


def _texts(folder: Path) -> list[str]:
    return [(folder / name).read_text(encoding="utf-8") for name in _FILES]


def test_it_prints_what_it_would_write_and_writes_nothing(
    catalog: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _texts(catalog)
    assert _run(catalog, _RESULTS) == 0
    assert _texts(catalog) == before
    told = capsys.readouterr()
    so_far = round(context_term(find_gpu("H200-141G")).num_bytes / MIB)
    assert told.out.startswith(
        f"# gpus.toml: context of H200-141G, {so_far} MiB so far, now 561 ({561 - so_far:+} MiB)\n"
        "[[gpu]]\n"
        'name = "H200-141G"\n'
        "context_mib = 561\n"
        'context_source = "measured: made.json, 2026-01-02, torch 2.11.0+cu130, training step of a small '
        'transformer"\n'
    )
    device_memory = catalog_rates().of(RateName.DEVICE_MEMORY, _HOPPER, gpu="NVIDIA H200")
    assert (
        f"\n# rates.toml: device memory, {device_memory.value:g} so far ({device_memory.basis}), now 0.9\n"
        "[[rate]]\n"
        'name = "device memory"\n'
        "value = 0.9\n"
        'unit = "fraction"\n'
        'basis = "published"\n'
        'gpus = ["NVIDIA H200"]\n'
        'source = "measured: made.json, 2026-01-02, torch 2.11.0+cu130: 90.0% of the peak of NVIDIA H200, '
        'how it was"\n'
    ) in told.out
    assert told.err.startswith("left out: copy from and to pinned memory: of this host")


def test_what_is_written_is_what_the_loaders_read(catalog: Path) -> None:
    assert _run(catalog, _RESULTS, "--write") == 0
    gpus = {gpu.name: gpu for gpu in read_gpus(str(catalog / "gpus.toml"))}
    h200 = gpus.pop("H200-141G").spec
    assert (h200.context_bytes, context_term(h200).num_bytes) == (561 * MIB, 561 * MIB)
    assert gpus == {gpu.name: gpu for gpu in load_gpus() if gpu.name != "H200-141G"}
    rates = read_rates(str(catalog / "rates.toml"))
    assert rates.of(RateName.DEVICE_MEMORY, _HOPPER, gpu=h200.name).value == 0.9
    assert rates.of(RateName.MATMUL_16BIT, _HOPPER, gpu=h200.name).value == 0.6


def _of(rates: Rates, name: RateName, gpu: str) -> Rate:
    spec = find_gpu(gpu)
    return rates.of(name, spec.compute_capability, gpu=spec.name)


def test_other_gpus_keep_their_rates_and_hosts_theirs(catalog: Path) -> None:
    assert _run(catalog, _RESULTS, "--write") == 0
    rates, known = read_rates(str(catalog / "rates.toml")), catalog_rates()
    of_hosts = (RateName.DISPATCH, RateName.HOST_MEMORY, RateName.PINNED_COPY)
    for gpu in {gpu.name for gpu in load_gpus()}:
        spec = find_gpu(gpu)
        for name in of_hosts if gpu == "H200-141G" else RateName:
            found, before = (each.of(name, spec.compute_capability, gpu=spec.name) for each in (rates, known))
            assert found == before


def test_two_gpus_of_one_generation_each_keep_what_was_measured_on_them(catalog: Path) -> None:
    assert _run(catalog, _RESULTS, "--write") == 0
    h100 = replace(_RESULTS.machine, device="NVIDIA H100 80GB HBM3", memory_bytes=round(79.1 * GIB))
    slower = Calibration(rates=(_measured(RateName.DEVICE_MEMORY, 2.68e12, Unit.BYTES_PER_S),), left_out=())
    assert _run(catalog, replace(_RESULTS, machine=h100, calibration=slower), "--write") == 0
    rates = read_rates(str(catalog / "rates.toml"))
    found = [_of(rates, RateName.DEVICE_MEMORY, gpu).value for gpu in ("H200", "H100", "H100-PCIe")]
    assert found == [0.9, 0.8, _of(catalog_rates(), RateName.DEVICE_MEMORY, "H100-PCIe").value]


def test_a_second_write_changes_nothing_and_a_later_one_replaces(
    catalog: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(catalog, _RESULTS, "--write") == 0
    once = _texts(catalog)
    assert capsys.readouterr().err.count("written: ") == 2
    assert _run(catalog, _RESULTS, "--write") == 0
    assert _texts(catalog) == once
    assert "written: " not in capsys.readouterr().err

    later = replace(_CONTEXT, with_kernels_bytes=600 * MIB)
    assert _run(catalog, replace(_RESULTS, context=later), "--write") == 0
    gpus, rates = _texts(catalog)
    assert gpus == once[0].replace("context_mib = 561\n", "context_mib = 600\n")
    assert rates == once[1]
    assert sorted(path.name for path in catalog.iterdir()) == ["gpus.toml", "made.json", "rates.toml"]


def test_what_the_catalog_calls_measured_lies_in_the_repository() -> None:
    sources = [gpu.spec.context_source for gpu in load_gpus()]
    sources += [rate.source for rate in catalog_rates().rates]
    own = [source.removeprefix("measured: ") for source in sources if source.startswith("measured: ")]
    files = {source.split(",")[0] for source in own}
    assert {file for file in files if not (_CATALOG.parents[1] / file).is_file()} == set()
