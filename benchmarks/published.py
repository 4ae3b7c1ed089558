"""Predict every published measurement of published_cases.toml.

Prints each case with its prediction and error, then the errors by source and by kind of training, and writes
them to measured/published.json where all cases were run. It needs no GPU: others had one.
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from published_steps import errors_of

from zerofit.core.allocation_log import Packing
from zerofit.core.estimates import Holder, MemoryEstimate
from zerofit.core.facts import Versions, Workload
from zerofit.core.plan import Topology
from zerofit.core.strategy import (
    Buckets,
    Engine,
    Lora,
    OptimizerName,
    Precision,
    Quantization,
    Strategy,
    ZeroStage,
)
from zerofit.core.units import GIB, MIB
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.models.find import probe_model
from zerofit.models.task import Task
from zerofit.models.trace.cache import default_cache_folder
from zerofit.models.trace.entry import trace_model
from zerofit.planning.estimate.closed_form.log import closed_form_log
from zerofit.planning.estimate.device_memory.memory import estimate_memory
from zerofit.planning.estimate.device_memory.non_torch_memory import non_torch_terms
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.training_estimator import UNCERTAINTY, closed_form_memory, trace_request_for

_FOLDER = Path(__file__).parent
CASES = _FOLDER / "published_cases.toml"
_UNITS = {"B": 1, "G": GIB, "MiB": MIB, "GiB": GIB, "GB": 10**9}
_OPTIMIZERS = {
    "adamw-hf": OptimizerName.ADAMW,  # it steps tensor by tensor, and holds at the most one of them more
    "adamw-fused": OptimizerName.ADAMW,
    "adamw-foreach": None,
    "adamw-8bit": OptimizerName.ADAMW_8BIT,
    "adafactor": OptimizerName.ADAFACTOR,
}
_HOLDERS = {
    "allocated": (Holder.TENSORS,),
    "reserved": (Holder.TENSORS, Holder.CACHE),
    "device": (Holder.TENSORS, Holder.CACHE, Holder.OUTSIDE),
}
_FORMATS = ("adapters", "saved_modules")
"""Formats of what trains, where they are not as zerofit makes them."""
_CACHE = default_cache_folder(os.environ, Path.home())
_OLD_TORCH = (*(f"1.{minor}." for minor in range(10)), "1.10")
"""Versions whose softmax keeps its input."""
_DEEPSPEED_BUCKETS = Buckets(reduce_bucket_size=500_000_000, allgather_bucket_size=500_000_000)
"""DeepSpeed's own sizes, which a published run had unless it says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPeak:
    """One measurement, and what was predicted of it."""

    source: str
    name: str
    not_known: str
    """What is missing to count the case in the goal; empty where nothing is."""
    measured_bytes: int | None
    """None where the run was out of memory."""
    predicted_bytes: int
    uncertainty: float
    """Stated with the prediction, relative."""
    fast_bytes: int
    """Predicted by closed forms, as `plan --fast` does; ± UNCERTAINTY."""
    kind: str
    """Of training: "full", "LoRA", "QLoRA", with " under ZeRO" behind it."""
    gpu_bytes: int
    """What a process can take of the GPU."""
    is_g: bool
    """True if the unit is a bare G, read as GiB."""
    doubts: tuple[str, ...]

    @property
    def error(self) -> float | None:
        """Relative, positive where too much was predicted."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else None


def main() -> None:
    """Predict the named cases, or all."""
    names = parse_names(__doc__)
    sources = tomllib.loads(CASES.read_text(encoding="utf-8"))["source"]
    cases = []
    for source in sources:
        for row in ({**source, **row} for row in source["rows"]):
            if "not_predicted" not in row and (not names or row["id"] in names):
                cases.append(predict(source["name"], row))
                print(_line(cases[-1]), flush=True)
    summary = _summary(cases)
    print(json.dumps(summary, indent=2))
    if not names:
        rows = [_row(case) for case in cases]
        text = json.dumps({"summary": summary, "cases": rows}, indent=1) + "\n"
        (_FOLDER / "measured" / "published.json").write_text(text, encoding="utf-8")


def parse_names(what: str | None) -> list[str]:
    """Return the cases that the command line names; none for all.

    Args:
        what: what --help says of the program.
    """
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=what, formatter_class=keep_lines)
    parser.add_argument("names", nargs="*", metavar="ID", help="cases of published_cases.toml; default: all")
    names: list[str] = parser.parse_args().names
    return names


def predict(source: str, row: dict[str, Any]) -> PublishedPeak:
    strategy = _strategy(row)
    gpu = find_gpu(row["gpu"])
    model = probe_model(row["model"], task=Task(row["task"]))
    model = replace(model, config={**model.config, **row.get("config", {})})
    keeps_outputs = row.get("keeps_outputs", False)
    workload = Workload(
        sequence_length=row["sequence_length"], is_padded=row["is_padded"], keeps_outputs=keeps_outputs
    )
    request = trace_request_for(strategy, workload, gpu)
    if "weights" in row:  # a loop of its own, which loads the weights so and casts where it says
        autocast = Precision(row["autocast"]) if "autocast" in row else None
        request = replace(request, weights=Precision(row["weights"]), autocast=autocast)
    formats: dict[str, Any] = {name: Precision(row[name]) for name in _FORMATS if name in row}
    request = replace(request, **formats)
    request = replace(request, packing=Packing(**row.get("packing", {})))
    if row.get("torch", "").startswith(_OLD_TORCH):
        request = replace(request, softmax_saves_input=True)
    trace = trace_model(model, request, cache_folder=_CACHE)
    setup = Setup(
        log=trace.log_for(row["micro_batch_size"]),
        strategy=strategy,
        topology=Topology(world_size=row.get("ranks", 1)),
        versions=Versions(python="3", zerofit="0", torch=row.get("torch")),
        keeps_outputs=keeps_outputs,
    )
    memory = estimate_memory(setup, gpu=gpu)
    fast_setup = replace(setup, log=closed_form_log(model.facts, request))
    fast = closed_form_memory(fast_setup, non_torch_terms(gpu, setup.topology, setup.versions))
    return PublishedPeak(
        source=source,
        name=row["id"],
        not_known=row.get("not_known", ""),
        measured_bytes=round(row["measured"] * _UNITS[row["unit"]]) if "measured" in row else None,
        predicted_bytes=_peak(memory, row["metric"]),
        uncertainty=memory.uncertainty,
        fast_bytes=_peak(fast, row["metric"]),
        kind=_kind(strategy),
        gpu_bytes=gpu.usable_bytes,
        is_g=row["unit"] == "G",
        doubts=tuple(row.get("doubts", ())),
    )


def _strategy(row: dict[str, Any]) -> Strategy:
    stage = ZeroStage(row.get("zero_stage", 0))
    lora = row.get("lora")
    return Strategy(
        engine=Engine.DEEPSPEED if stage else Engine.NATIVE,
        zero_stage=stage,
        precision=Precision(row["precision"]),
        micro_batch_size=row["micro_batch_size"],
        gradient_accumulation_steps=row.get("gradient_accumulation_steps", 1),
        gradient_checkpointing=row.get("gradient_checkpointing", False),
        optimizer=_OPTIMIZERS[row["optimizer"]],
        attention=row["attention"],
        lora=Lora(
            rank=lora["rank"],
            target_modules=tuple(lora["targets"]),
            modules_to_save=tuple(lora.get("saved", ())),
        )
        if lora
        else None,
        quantization=Quantization(row["quantization"]) if "quantization" in row else None,
        buckets=_DEEPSPEED_BUCKETS if stage else Buckets(),
    )


def _kind(strategy: Strategy) -> str:
    kind = "QLoRA" if strategy.quantization else "LoRA" if strategy.lora else "full"
    return kind if strategy.engine is Engine.NATIVE else f"{kind} under ZeRO"


def _peak(memory: MemoryEstimate, metric: str) -> int:
    return max(phase.held_by(*_HOLDERS[metric]) for phase in memory.phases)


def _line(case: PublishedPeak) -> str:
    predicted = f"{case.name:44} {case.predicted_bytes / GIB:8.2f} GiB"
    if case.error is None:
        is_right = case.predicted_bytes > case.gpu_bytes
        return f"{predicted}, out of memory in {case.gpu_bytes / GIB:.1f}: {'right' if is_right else 'WRONG'}"
    measured = f"{(case.measured_bytes or 0) / GIB:8.2f}"
    with_gb = f" ({(1 + case.error) * GIB / 10**9 - 1:+.1%} if G is GB)" if case.is_g else ""
    missing = f"   not known: {case.not_known}" if case.not_known else ""
    return f"{predicted} of {measured} {case.error:+7.1%}{with_gb}{missing}"


def _row(case: PublishedPeak) -> dict[str, Any]:
    return {
        "id": case.name,
        "source": case.source,
        "not_known": case.not_known,
        "kind": case.kind,
        "measured_bytes": case.measured_bytes,
        "predicted_bytes": case.predicted_bytes,
        "error": None if case.error is None else round(case.error, 4),
        "uncertainty": round(case.uncertainty, 4),
        "fast_bytes": case.fast_bytes,
        "doubts": case.doubts,
    }


def _summary(cases: list[PublishedPeak]) -> dict[str, Any]:
    groups: dict[str, list[PublishedPeak]] = {}
    for case in cases:
        if case.error is not None:
            state = "known" if not case.not_known else "not known"
            fast = replace(case, predicted_bytes=case.fast_bytes, uncertainty=UNCERTAINTY)
            groups.setdefault(f"all, by closed forms: what is {state}", []).append(fast)
            for name in (f"{case.source}", f"all {case.kind}", "all"):
                groups.setdefault(f"{name}: what is {state}", []).append(case)
    return {name: _errors_of(groups[name]) for name in sorted(groups)}


def _errors_of(cases: list[PublishedPeak]) -> dict[str, Any]:
    known = [(case.error, case.uncertainty) for case in cases if case.error is not None]
    return errors_of([error for error, _ in known], [abs(error) <= most for error, most in known])


if __name__ == "__main__":
    main()
