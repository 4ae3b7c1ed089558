"""The catalog of GPUs: every entry is whole and plausible, and found by the names that people use."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from each_row import in_each
from refusals import refusal

from zerofit.core.facts import GpuSpec
from zerofit.core.units import GIB, MIB
from zerofit.machine import gpu_catalog
from zerofit.machine.gpu_catalog import (
    CatalogGpu,
    _key,
    find_gpu,
    load_gpus,
    read_gpus,
    with_catalog_rates,
)
from zerofit.machine.machine_spec import parse_gpus

_GPUS = load_gpus()


_each = in_each(_GPUS, lambda gpu: gpu.name)


@_each
def test_every_entry_has_its_sources(gpu: CatalogGpu) -> None:
    assert gpu.sources
    assert all(link.startswith("https://") for link in gpu.sources)


def test_no_short_name_or_alias_means_two_gpus() -> None:
    keys = [_key(name) for gpu in _GPUS for name in (gpu.name, *gpu.aliases)]
    assert sorted(keys) == sorted(set(keys))


def test_a_driver_name_and_a_memory_mean_one_gpu() -> None:
    shared = [
        (one, other)
        for one, other in combinations(_GPUS, 2)
        if set(map(_key, one.driver_names)) & set(map(_key, other.driver_names))
    ]
    assert [(one.name, other.name) for one, other in shared] == [
        ("RTX3080-10G", "RTX3080-12G"),
        ("RTX4060Ti-8G", "RTX4060Ti-16G"),
        ("RTX5060Ti-8G", "RTX5060Ti-16G"),
    ]
    for one, other in shared:
        assert abs(one.spec.memory_bytes / other.spec.memory_bytes - 1) > 0.15


@_each
def test_memory_is_a_little_below_the_gigabytes_in_the_name(gpu: CatalogGpu) -> None:
    sizes = [name.rsplit("-", 1)[-1] for name in (gpu.name, *gpu.aliases)]
    sizes += [part for name in (gpu.name, *gpu.aliases) for part in name.split("-")]
    named = [int(size[:-1]) for size in sizes if size.endswith("G") and size[:-1].isdigit()]
    for gigabytes in named:
        assert 0.93 * gigabytes * GIB <= gpu.spec.memory_bytes <= 1.025 * gigabytes * GIB
    assert 0 < gpu.spec.reserved_bytes < 0.065 * gpu.spec.memory_bytes


def _rates(gpu: CatalogGpu) -> dict[str, float]:
    names = (
        "memory_bytes_per_s",
        "fp32_flops_per_s",
        "fp16_flops_per_s",
        "peer_bytes_per_s",
        "host_bytes_per_s",
    )
    rates = {name: getattr(gpu.spec, name) for name in names}
    assert None not in rates.values()
    return rates


@_each
def test_rates_are_of_a_gpus_order(gpu: CatalogGpu) -> None:
    rates = _rates(gpu)
    assert 250e9 <= rates["memory_bytes_per_s"] <= 8e12
    assert 8e12 <= rates["fp32_flops_per_s"] <= 200e12
    assert rates["fp32_flops_per_s"] <= rates["fp16_flops_per_s"] <= 2520e12
    assert 15e9 <= rates["host_bytes_per_s"] <= rates["peer_bytes_per_s"] <= 900e9
    assert rates["peer_bytes_per_s"] < rates["memory_bytes_per_s"]
    # From 13 (P100, without tensor cores) to 419 (L40S) flops are done in the time of one byte.
    assert 10 <= rates["fp16_flops_per_s"] / rates["memory_bytes_per_s"] <= 500


@_each
def test_bf16_and_tf32_are_there_from_ampere_on(gpu: CatalogGpu) -> None:
    spec = gpu.spec
    if spec.compute_capability is None:
        assert spec.bf16_flops_per_s == spec.fp16_flops_per_s
        assert spec.has_bf16
        return
    assert (spec.bf16_flops_per_s is not None) == (spec.tf32_flops_per_s is not None) == spec.has_bf16
    if spec.bf16_flops_per_s is not None and spec.tf32_flops_per_s is not None:
        assert spec.bf16_flops_per_s == spec.fp16_flops_per_s
        # tf32 runs at half the rate of bf16; the sheets round each by itself.
        assert spec.tf32_flops_per_s == pytest.approx(spec.bf16_flops_per_s / 2, rel=0.02)


@_each
def test_fast_links_are_what_is_faster_than_pcie(gpu: CatalogGpu) -> None:
    spec = gpu.spec
    is_superchip = gpu.name == "GH200-96G"  # whose host link is NVLink as well
    assert spec.has_fast_links == (
        is_superchip or (spec.peer_bytes_per_s or 0) > (spec.host_bytes_per_s or 0)
    )


@pytest.mark.parametrize(
    ("name", "driver_name", "memory_mib"),
    [
        ("A100-80G", "NVIDIA A100-SXM4-80GB", 81920),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB", 81920),
        ("A100 80G PCIe", "NVIDIA A100 80GB PCIe", 81920),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-PCIE-40GB", 40960),
        ("H100", "NVIDIA H100 80GB HBM3", 81559),
        ("h100 pcie", "NVIDIA H100 PCIe", 81559),
        ("H100-NVL", "NVIDIA H100 NVL", 95830),
        ("GH200", "NVIDIA GH200 480GB", 97871),
        ("4090", "NVIDIA GeForce RTX 4090", 24564),
        ("RTX4090", "NVIDIA GeForce RTX 4090", 24564),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", 24564),
        ("3090 Ti", "NVIDIA GeForce RTX 3090 Ti", 24564),
        ("3090", "NVIDIA GeForce RTX 3090", 24576),
        ("RTX 4070 Ti Super", "NVIDIA GeForce RTX 4070 Ti SUPER", 16376),
        ("rtx 4060 ti 16gb", "NVIDIA GeForce RTX 4060 Ti", 16380),
        ("RTX A6000", "NVIDIA RTX A6000", 49140),
        ("Tesla T4", "Tesla T4", 15360),
        ("v100-32g", "Tesla V100-SXM2-32GB", 32768),
        ("MI300X", "AMD Instinct MI300X", 196592),
        ("MI350X", "AMD Instinct MI350X", 294896),
        ("MI355X", "AMD Instinct MI355X", 294896),
        ("B300", "NVIDIA B300 SXM6 AC", 275040),
        ("GB200", "NVIDIA GB200", 189471),
        ("GB10", "NVIDIA GB10", 122502),
        ("AMD Instinct MI250X/MI250", "AMD Instinct MI250X", 65520),
        ("RTX4060", "NVIDIA GeForce RTX 4060", 8188),
        ("5060 Ti 16G", "NVIDIA GeForce RTX 5060 Ti", 16311),
    ],
)
def test_gpus_are_found_by_the_names_that_people_use(name: str, driver_name: str, memory_mib: int) -> None:
    gpu = find_gpu(name)
    assert (gpu.name, gpu.memory_bytes) == (driver_name, memory_mib * MIB)


@_each
def test_every_name_of_an_entry_finds_it(gpu: CatalogGpu) -> None:
    assert {find_gpu(name) for name in (gpu.name, *gpu.aliases)} == {gpu.spec}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("RTX4900", "RTX4090"),
        ("8xRTX3009", "8xRTX3090"),
        ("GeForce RTX 5900", "RTX5090"),
        ("2 x Tesla V1000", "2 x V100-16G"),
        ("NVIDIA H1OO", "H100-80G"),
        ("4xL4O", "4xL40"),
        ("MI 30X", "MI300X-192G"),
        ("8xB2000", "8xB200-180G"),
    ],
)
def test_a_misspelt_name_gets_those_of_its_series(typed: str, meant: str) -> None:
    error = refusal(parse_gpus, typed)
    assert error.rule == "unknown-gpu"
    names = error.fix.partition(", if that was meant")[0].removeprefix("--gpus ").split(" or ")
    assert meant in names
    assert all(parse_gpus(name) for name in names)


def test_a_name_that_is_not_one_gpu_is_refused(golden: Callable[[str, str], None]) -> None:
    names = ("a100", "4060 Ti", "A100-8OG", "RTX")
    golden("".join(f"{refusal(find_gpu, name)}\n" for name in names), "machine/gpu-names.txt")


@pytest.mark.parametrize(
    "name",
    [
        "ada",
        "titan",
        "pcie",
        "24g",
        "80GB",
        "SXM4",
        "HBM3",
        "NVL",
        "Ti",
        "super",
        "blackwell",
        "A100 foo",
        "-",
    ],
)
def test_a_word_that_names_no_product_finds_nothing(name: str) -> None:
    assert refusal(find_gpu, name).rule == "unknown-gpu"


@pytest.mark.parametrize("name", ["4060", "3060", "5060", "5070", "4070", "4080", "3090"])
def test_a_number_is_not_that_of_another_card_with_a_word_more(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tuple(gpu for gpu in _GPUS if _key(gpu.spec.name) != name)
    assert len(others) < len(_GPUS)
    monkeypatch.setattr(gpu_catalog, "load_gpus", lambda: others)
    assert refusal(find_gpu, f"RTX{name}").rule == "unknown-gpu"


def test_a_probed_gpu_keeps_what_the_driver_says_and_gets_the_rates() -> None:
    # An older driver: another total, and no word of NVIDIA in the name.
    probed = GpuSpec(name="A100-SXM4-80GB", memory_bytes=81251 * MIB, compute_capability=(8, 0))
    spec = with_catalog_rates(probed)
    assert (spec.name, spec.memory_bytes, spec.reserved_bytes) == ("A100-SXM4-80GB", 81251 * MIB, 0)
    assert (spec.memory_bytes_per_s, spec.bf16_flops_per_s, spec.has_fast_links) == (2039e9, 312e12, True)


def test_cards_of_one_name_are_told_apart_by_their_memory() -> None:
    rates = [
        with_catalog_rates(GpuSpec(name="NVIDIA GeForce RTX 3080", memory_bytes=mib * MIB)).memory_bytes_per_s
        for mib in (10240, 12288, 20480)
    ]
    assert rates == [760e9, 912e9, None]


_ENTRY = """
[[gpu]]
name = "made"
aliases = []
driver_names = ["NVIDIA Made"]
memory_mib = 81920
memory_gb_per_s = 2000
fp32_tflops = 20
fp16_tflops = 300
peer_gb_per_s = 300
host_gb_per_s = 30
sources = ["https://example.com"]
"""


@pytest.mark.parametrize(
    ("lines", "context"),
    [
        ("", (None, "")),
        (
            'context_mib = 600\ncontext_source = "https://example.com/log"\n',
            (600 * MIB, "https://example.com/log"),
        ),
    ],
)
def test_an_entry_may_say_what_its_context_takes(
    lines: str, context: tuple[int | None, str], tmp_path: Path
) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text(_ENTRY + lines)
    (gpu,) = read_gpus(str(file))
    assert (gpu.spec.context_bytes, gpu.spec.context_source) == context


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("context_mib = 600", "629145600 with context_source ''"),
        ('context_source = "a log"', "None with context_source 'a log'"),
    ],
)
def test_a_context_without_a_source_is_refused_and_a_source_without_one_too(
    line: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text(_ENTRY + line + "\n")
    with pytest.raises(ValueError, match="context_bytes") as caught:
        read_gpus(str(file))
    assert str(caught.value) == f"context_bytes: {said}: both stand, or neither"


def test_a_probed_gpu_gets_the_context_of_its_entry(tmp_path: Path) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text(_ENTRY + 'context_mib = 600\ncontext_source = "https://example.com/log"\n')
    probed = with_catalog_rates(
        GpuSpec(name="NVIDIA Made", memory_bytes=81000 * MIB), gpus=read_gpus(str(file))
    )
    assert (probed.context_bytes, probed.context_source) == (600 * MIB, "https://example.com/log")
