"""The GPU catalog zerofit/catalog/gpus.toml, and lookup by users' and drivers' names."""

from __future__ import annotations

import difflib
import functools
import os
import re
import tomllib
from dataclasses import dataclass, replace
from typing import Any

from zerofit.core.catalog_folder import CATALOG_FOLDER
from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec
from zerofit.core.units import GIB, MIB

_FILE = os.path.join(CATALOG_FOLDER, "gpus.toml")

RESERVED_BYTES = 512 * MIB
"""Memory that the driver reserves on a GPU whose usable memory is unknown.

ASSUMPTION: the catalog's known values are between 360 and 770 MiB.
"""
_SAME_MEMORY = 0.05
"""Relative tolerance when comparing memory with the catalog's.

ASSUMPTION: drivers differ by up to 1.7 % in what they report for one GPU (15109 and 15360 MiB of a T4);
cards of the same name with different memory, which may also be slower, differ by 20 % or more (RTX 3080).
"""
_MAKERS = frozenset({"nvidia", "amd", "instinct", "tesla", "geforce", "quadro", "rtx"})
"""Words of drivers' names that users omit."""
_FORM_FACTOR = re.compile(r"\d+g|(?:sxm|hbm)\d.*|\D+")
"""Words for form factor or series; the product's own word contains a number."""
_VARIANTS = frozenset({"ti", "super"})
"""Words that distinguish products with the same number."""
_RATES = (
    "memory_bytes_per_s",
    "fp32_flops_per_s",
    "tf32_flops_per_s",
    "fp16_flops_per_s",
    "bf16_flops_per_s",
    "peer_bytes_per_s",
    "host_bytes_per_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogGpu:
    """One entry of the catalog."""

    name: str
    """The short name for input and lists."""
    aliases: tuple[str, ...]
    """Other names that denote only this entry."""
    driver_names: tuple[str, ...]
    """The driver's product names; entries that differ in memory may share one."""
    spec: GpuSpec
    """The GPU's specification, under its first driver name."""
    sources: tuple[str, ...]
    """Links to data sheets and logs."""
    shares_host_memory: bool = False
    """True if GPU and host have one memory; the GPU's reserved bytes are the host's."""


@functools.cache
def load_gpus() -> tuple[CatalogGpu, ...]:
    """Return every GPU of the catalog, in order."""
    return read_gpus(_FILE)


def read_gpus(file_name: str) -> tuple[CatalogGpu, ...]:
    """Return every GPU of a file in the format of zerofit/catalog/gpus.toml.

    Raises:
        KeyError: an entry lacks a required key; the file's head lists them.
        ValueError: it is no TOML, or an entry has only one of context_mib and context_source.
    """
    with open(file_name, "rb") as file:
        return tuple(_entry(plain) for plain in tomllib.load(file)["gpu"])


def find_gpu(name: str, *, said: str | None = None) -> GpuSpec:
    """Return the GPU with a short name, alias or driver name, ignoring case, spaces and dashes.

    A name without a form factor means the SXM board, and "H100" the 80 GB one. A name of several GPUs that
    differ in memory, such as "A100", is an error, since everything depends on the memory.

    Args:
        name: the GPU's name.
        said: the user's text after --gpus, for messages; None means the name.

    Raises:
        UserError: no GPU of the catalog has this name, or several do.
    """
    named = [gpu for gpu in load_gpus() if _key(name) in map(_key, (gpu.name, *gpu.aliases))]
    driven = [gpu for gpu in load_gpus() if _key(name) in map(_key, gpu.driver_names)]
    found = named or driven or [gpu for gpu in load_gpus() if _has_all_words(gpu, name)]
    if len(found) == 1:
        return found[0].spec
    raise _ambiguous(name, said or name, found) if found else _unknown(name, said or name)


def with_catalog_rates(spec: GpuSpec, *, gpus: tuple[CatalogGpu, ...] | None = None) -> GpuSpec:
    """Return a GPU reported by the driver with missing rates filled in from the catalog.

    Name, memory and compute capability are kept. A GPU that is not in the catalog, or only with another
    memory size, is returned unchanged.

    Args:
        spec: the driver's report.
        gpus: the entries to search; None means the catalog's.
    """
    gpu = catalog_gpu(spec.name, spec.memory_bytes, gpus=gpus)
    if gpu is None:
        return spec
    lacking = {rate: getattr(gpu.spec, rate) for rate in _RATES if getattr(spec, rate) is None}
    return replace(
        spec,
        **lacking,
        has_fast_links=gpu.spec.has_fast_links,
        context_bytes=gpu.spec.context_bytes,
        context_source=gpu.spec.context_source,
    )


def catalog_gpu(
    driver_name: str, memory_bytes: int, *, gpus: tuple[CatalogGpu, ...] | None = None
) -> CatalogGpu | None:
    """Return the catalog entry for a driver's product name; None if none has this much memory.

    Args:
        driver_name: the product name.
        memory_bytes: its memory, with or without what the driver reserves.
        gpus: the entries to search; None means the catalog's.
    """
    for gpu in load_gpus() if gpus is None else gpus:
        is_named = _key(driver_name) in map(_key, gpu.driver_names)
        known = (gpu.spec.memory_bytes, gpu.spec.usable_bytes)
        difference = min(abs(memory_bytes - size) for size in known)
        if is_named and difference <= _SAME_MEMORY * gpu.spec.memory_bytes:
            return gpu
    return None


def _entry(plain: dict[str, Any]) -> CatalogGpu:
    memory_bytes = plain["memory_mib"] * MIB
    usable_gib = plain.get("usable_gib")
    capability = plain.get("compute_capability")
    context_mib = plain.get("context_mib")
    return CatalogGpu(
        name=plain["name"],
        aliases=tuple(plain["aliases"]),
        driver_names=tuple(plain["driver_names"]),
        sources=tuple(plain["sources"]),
        shares_host_memory=plain.get("shares_host_memory", False),
        spec=GpuSpec(
            name=plain["driver_names"][0],
            memory_bytes=memory_bytes,
            reserved_bytes=RESERVED_BYTES if usable_gib is None else memory_bytes - round(usable_gib * GIB),
            compute_capability=None if capability is None else (capability[0], capability[1]),
            memory_bytes_per_s=plain["memory_gb_per_s"] * 1e9,
            fp32_flops_per_s=plain["fp32_tflops"] * 1e12,
            tf32_flops_per_s=_flops(plain.get("tf32_tflops")),
            fp16_flops_per_s=plain["fp16_tflops"] * 1e12,
            bf16_flops_per_s=_flops(plain.get("bf16_tflops")),
            peer_bytes_per_s=plain["peer_gb_per_s"] * 1e9,
            host_bytes_per_s=plain["host_gb_per_s"] * 1e9,
            has_fast_links=plain.get("has_fast_links", False),
            context_bytes=None if context_mib is None else context_mib * MIB,
            context_source=plain.get("context_source", ""),
        ),
    )


def _flops(tflops: float | None) -> float | None:
    return None if tflops is None else tflops * 1e12


def _words(name: str) -> tuple[str, ...]:
    """Return the words that distinguish GPUs: "NVIDIA A100-SXM4-80GB" gives ("a100", "sxm4", "80g")."""
    text = re.sub(r"(\d)\s*(?:gib|gb|g)\b", r"\1g", name.lower())
    text = re.sub(r"\brtx(?=a?\d)", "rtx ", text)
    text = re.sub(r"\btitan\W*rtx\b", "titanrtx", text)
    return tuple(word for word in re.split(r"[^a-z0-9]+", text) if word and word not in _MAKERS)


def _key(name: str) -> str:
    return "".join(_words(name))


def _has_all_words(gpu: CatalogGpu, name: str) -> bool:
    """Return True if one of a GPU's names contains all words of `name`, including a product's word.

    "4060" is no 4060 Ti, and "80G" or "PCIe" is no product.
    """
    words = set(_words(name))
    if all(_FORM_FACTOR.fullmatch(word) for word in words):
        return False
    others = (set(_words(other)) for other in (gpu.name, *gpu.aliases, *gpu.driver_names))
    return any(words <= other and not (other - words) & _VARIANTS for other in others)


def _ambiguous(name: str, said: str, found: list[CatalogGpu]) -> UserError:
    choices = [gpu.name for gpu in found]
    return UserError(
        "gpu-ambiguous",
        f"several GPUs are called {name!r}",
        found=f"--gpus {said}",
        why=f"it can be {', '.join(choices[:-1])} or {choices[-1]}",
        fix=f"name one of them, such as {choices[0]}",
    )


def nearest_gpus(text: str) -> tuple[str, ...]:
    """Return up to three names of the catalog similar to a misspelt one, best first; those of its series."""
    spellings = {name.lower(): gpu.name for gpu in load_gpus() for name in (gpu.name, *gpu.aliases)}
    makers = "|".join(_MAKERS - {"rtx"})  # a series of its own in the catalog's names
    word = re.sub(rf"{makers}|\s", "", text.lower())
    series = re.match(r"[a-z]*", word)
    same = [name for name in spellings if series and series[0] and name.startswith(series[0])]
    near = difflib.get_close_matches(word, same, n=9, cutoff=0.5)
    near += difflib.get_close_matches(word, spellings, n=9, cutoff=0.6)
    return tuple(dict.fromkeys(spellings[name] for name in near))[:3]


def _unknown(name: str, said: str) -> UserError:
    near = nearest_gpus(name)
    count = said[: -len(name)] if said.endswith(name) else ""
    meant = f"--gpus {' or '.join(f'{count}{other}' for other in near)}, if that was meant; " if near else ""
    return UserError(
        "unknown-gpu",
        f"there is no GPU {name!r} in the catalog",
        found=f"--gpus {said}",
        why="its memory and rates are unknown; `zerofit gpus` lists those that are known",
        fix=f"{meant}{'else ' if near else ''}give the memory instead of the name, such as --gpus 1x24G",
    )
