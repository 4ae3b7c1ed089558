"""The cache of traces: one compressed file each, named by all that decides it. No torch in here."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import zlib
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import (
    AllocationLog,
    CostKind,
    OperatorCost,
    Pass,
    Storages,
    TensorKind,
    Trace,
    TracedParameter,
)
from zerofit.core.atomic_file import write_whole
from zerofit.core.cache_folder import cache_folder
from zerofit.core.strategy import Precision

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zerofit.core.allocation_log import TraceRequest
    from zerofit.models.source import ModelSource

_PACKAGES = ("torch", "transformers", "accelerate", "peft")
_ZEROFIT = Path(__file__).parents[2]
_DECIDING = ("allocation_log.py", "strategy.py", "probe/model_meta.py", "probe/trace/*.py")
"""The files of zerofit that decide what a trace holds and in which order its enums are numbered."""
_MOST_BYTES = 256 << 20
"""What the folder may hold; the oldest traces go first."""
_KINDS, _COST_KINDS = tuple(TensorKind), tuple(CostKind)
_PASSES, _PRECISIONS = tuple(Pass), tuple(Precision)


def default_cache_folder(environment: Mapping[str, str], home: Path) -> Path:
    """Return where traces are kept: the folder traces in zerofit's cache folder.

    Args:
        environment: the process's variables.
        home: the user's folder.
    """
    return cache_folder(environment, home) / "traces"


def key_of(source: ModelSource, request: TraceRequest) -> str:
    """Return the name of a trace: a digest of the model, the request, the versions and the tracer itself."""
    told = {
        "config": source.config,
        "task": source.task.value,
        "place": source.place if source.trust_remote_code else None,
        "request": dataclasses.asdict(request),
        "versions": {name: _version(name) for name in _PACKAGES},
    }
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    files = [path for pattern in _DECIDING for path in sorted(_ZEROFIT.glob(pattern))]
    for path in files + (_remote_code(source) if source.trust_remote_code else []):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:40]


def _remote_code(source: ModelSource) -> list[Path]:
    """Return the files that a model's own Python code is known by.

    Of a folder its modules; of a repository on the hub the file in which the local cache keeps the commit
    that `main` was last seen at (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    found: list[Path] = []
    named = (str(value).split("--")[0] for value in (source.config.get("auto_map") or {}).values() if value)
    for place in sorted({source.place, *named}):
        if Path(place).is_dir():
            found += sorted(Path(place).rglob("*.py"))
        else:
            found.append(Path(HF_HUB_CACHE) / f"models--{place.replace('/', '--')}" / "refs" / "main")
    return [path for path in found if path.is_file()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_trace(path: Path, request: TraceRequest) -> Trace | None:
    """Return the trace in a file, or None where there is none or it can't be read."""
    try:
        text = zlib.decompress(path.read_bytes())
        length = int.from_bytes(text[:8], "little")
        header = json.loads(text[8 : 8 + length])
        numbers = array("q")
        numbers.frombytes(text[8 + length :])
        return Trace(request=request, logs=_unpacked(header, numbers))
    except (OSError, zlib.error, ValueError, KeyError, IndexError, TypeError):
        return None


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace whole or not at all, and remove the oldest ones where they are too much together.

    A folder that can't be written to keeps none.
    """
    header, numbers = _packed(trace.logs)
    text = json.dumps(header).encode()
    content = zlib.compress(len(text).to_bytes(8, "little") + text + numbers.tobytes(), 3)
    try:
        write_whole(path, content)
        _prune(path.parent, _MOST_BYTES)
    except OSError:
        return


def _prune(folder: Path, most_bytes: int) -> None:
    """Remove the oldest traces of a folder beyond a number of bytes."""
    total = 0
    seen = [(path.stat(), path) for path in folder.glob("*.trace")]
    for status, path in sorted(seen, key=lambda one: one[0].st_mtime_ns, reverse=True):
        total += status.st_size
        if total > most_bytes:
            path.unlink(missing_ok=True)


def _packed(logs: tuple[AllocationLog, ...]) -> tuple[dict[str, Any], array[int]]:
    """Return names and counts as JSON, and all columns of numbers one after the other."""
    numbers: array[int] = array("q")

    def column(values: Iterable[int]) -> int:
        before = len(numbers)
        numbers.extend(values)
        return len(numbers) - before

    first = logs[0]
    shared = {
        "modules": first.modules,
        "module_parameters": first.module_parameters,
        "parameters": [dataclasses.asdict(one) for one in first.parameters],
        "buffer_bytes": first.buffer_bytes,
    }
    packed = []
    for log in logs:
        storages = log.storages
        packed.append(
            {
                "least": log.least_micro_batch_size,
                "operators": log.operators,
                "costs": [_packed_cost(cost) for cost in log.costs],
                "num_gradients": column(log.gradient_storages),
                "num_storages": column(_KINDS.index(kind) for kind in storages.kinds),
                "columns": [
                    column(values)
                    for values in (
                        storages.fixed_bytes,
                        storages.bytes_per_sample,
                        storages.modules,
                        storages.operators,
                    )
                ],
                "num_events": column(log.codes),
                "num_arguments": column(log.arguments),
            }
        )
    return {"model": shared, "logs": packed, "num_numbers": len(numbers)}, numbers


def _packed_cost(cost: OperatorCost) -> tuple[Any, ...]:
    operator, kind, during, precision, *rest = dataclasses.astuple(cost)
    return (
        operator,
        _COST_KINDS.index(kind),
        _PASSES.index(during),
        _PRECISIONS.index(precision),
        *rest,
    )


def _unpacked(header: dict[str, Any], numbers: array[int]) -> tuple[AllocationLog, ...]:
    if header["num_numbers"] != len(numbers):
        raise ValueError("cut short")
    model = header["model"]
    modules = tuple(model["modules"])
    held = tuple(tuple(indices) for indices in model["module_parameters"])
    parameters = tuple(
        TracedParameter(**{**fields, "shape": tuple(fields["shape"])}) for fields in model["parameters"]
    )
    place = 0

    def column(length: int) -> tuple[int, ...]:
        nonlocal place
        place += length
        return tuple(numbers[place - length : place])

    logs = []
    for packed in header["logs"]:
        gradients = column(packed["num_gradients"])
        kinds = tuple(_KINDS[index] for index in column(packed["num_storages"]))
        fixed, each, born_in, made_by = (column(length) for length in packed["columns"])
        logs.append(
            AllocationLog(
                least_micro_batch_size=packed["least"],
                modules=modules,
                module_parameters=held,
                parameters=parameters,
                buffer_bytes=tuple(model["buffer_bytes"]),
                storages=Storages(
                    kinds=kinds,
                    fixed_bytes=fixed,
                    bytes_per_sample=each,
                    modules=born_in,
                    operators=made_by,
                ),
                operators=tuple(packed["operators"]),
                codes=bytes(column(packed["num_events"])),
                arguments=column(packed["num_arguments"]),
                gradient_storages=gradients,
                costs=tuple(_unpacked_cost(*cost) for cost in packed["costs"]),
            )
        )
    return tuple(logs)


def _unpacked_cost(
    operator: str,
    kind: int,
    during: int,
    precision: int,
    count: int,
    fixed_flops: int,
    flops_per_sample: int,
    fixed_bytes: int,
    bytes_per_sample: int,
) -> OperatorCost:
    return OperatorCost(
        operator=operator,
        kind=_COST_KINDS[kind],
        during=_PASSES[during],
        precision=_PRECISIONS[precision],
        count=count,
        fixed_flops=fixed_flops,
        flops_per_sample=flops_per_sample,
        fixed_bytes=fixed_bytes,
        bytes_per_sample=bytes_per_sample,
    )
