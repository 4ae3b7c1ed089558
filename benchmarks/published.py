"""Predict every published measurement of published_cases.toml.

Prints each case with its prediction and error, then the errors by source, kind of training and precision, and
how an uncertainty made of the other sources covers each. Where all cases were run it writes them to
measured/published.json. It needs no GPU: others had one. `--reports FOLDER` instead reads the reports of runs
(`zerofit runs report`) in a folder, and prints what was predicted beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tomllib
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litgpt_model import trace_litgpt
from published_reports import print_reports
from published_steps import errors_of

from zerofit.core.allocation_log import FusedKernel, Packing
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
from zerofit.models.weight_formats import format_of
from zerofit.planning.closed_form_estimator import closed_form_memory
from zerofit.planning.estimate.batch_lengths import BatchLengths
from zerofit.planning.estimate.closed_form.log import closed_form_log
from zerofit.planning.estimate.closed_form.uncertainty import UNCERTAINTY
from zerofit.planning.estimate.device_memory.memory import estimate_memory
from zerofit.planning.estimate.device_memory.non_torch_memory import non_torch_terms
from zerofit.planning.estimate.device_memory.ragged import with_ragged_batches
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.estimate.model_use import ModelUse
from zerofit.planning.trace_request import trace_request_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.allocation_log import TraceRequest
    from zerofit.models.source import ModelSource
    from zerofit.models.weight_formats import WeightFormat

_FOLDER = Path(__file__).parent
CASES = _FOLDER / "published_cases.toml"
_UNITS = {"B": 1, "G": GIB, "MiB": MIB, "GiB": GIB, "GB": 10**9}
_OPTIMIZERS = {
    "adamw-hf": OptimizerName.ADAMW,  # it steps tensor by tensor, and holds at the most one of them more
    "adamw-fused": OptimizerName.ADAMW,
    "adamw-foreach": None,
    "adamw-paged": OptimizerName.PAGED_ADAMW,
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
_PARTS = 100
"""Samples that stand for lengths of which the mean is stated."""
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
    kind: str
    """Of training: "full", "LoRA", "QLoRA", with " under ZeRO" behind it, or LitGPT's own adapters."""
    precision: str
    gpu_bytes: int
    """What a process can take of the GPU."""
    is_g: bool
    """True if the unit is a bare G, read as GiB."""
    doubts: tuple[str, ...]
    fast_bytes: int | None = None
    """Predicted by closed forms, as `plan --fast` does; ± UNCERTAINTY. None for LitGPT's adapters."""
    by_transformers_bytes: int | None = None
    """Predicted with transformers' classes, though the run had its own model code."""

    @property
    def error(self) -> float | None:
        """Relative, positive where too much was predicted."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else None


def main() -> None:
    """Predict the named cases, or all."""
    parser = _parser(__doc__)
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="of reports by `zerofit runs report`")
    arguments = parser.parse_args()
    if arguments.reports is not None:
        print_reports(arguments.reports)
        return
    names = arguments.names
    sources = tomllib.loads(CASES.read_text(encoding="utf-8"))["source"]
    cases = []
    for source in sources:
        for row in ({**source, **row} for row in source["rows"]):
            if "not_predicted" not in row and (not names or row["id"] in names):
                cases.append(predict(source["name"], row))
                print(_line(cases[-1]), flush=True)
    summary = _summary(cases)
    held = left_out(cases)
    print(json.dumps({"summary": summary, "left_out": held}, indent=2))
    if not names:
        rows = [_row(case) for case in cases]
        text = json.dumps({"summary": summary, "left_out": held, "cases": rows}, indent=1) + "\n"
        (_FOLDER / "measured" / "published.json").write_text(text, encoding="utf-8")


def parse_names(what: str | None) -> list[str]:
    """Return the cases that the command line names; none for all.

    Args:
        what: what --help says of the program.
    """
    names: list[str] = _parser(what).parse_args().names
    return names


def _parser(what: str | None) -> argparse.ArgumentParser:
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=what, formatter_class=keep_lines)
    parser.add_argument("names", nargs="*", metavar="ID", help="cases of published_cases.toml; default: all")
    return parser


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
    request = replace(request, packing=_packing(row), kernels=tuple(map(FusedKernel, row.get("kernels", ()))))
    if row.get("torch", "").startswith(_OLD_TORCH):
        request = replace(request, softmax_saves_input=True)
    adapter = row.get("adapter", 0)
    if row.get("code") == "litgpt":
        trace = trace_litgpt(model, request, adapter=adapter, cache_folder=_CACHE)
    elif row.get("copies_shifted_logits"):
        with _shifted_logits_copied():
            trace = trace_model(model, request, cache_folder=_CACHE / "shifted")
    else:
        trace = trace_model(model, request, cache_folder=_CACHE)
    setup = Setup(
        log=trace.log_for(row["micro_batch_size"]),
        strategy=strategy,
        topology=Topology(world_size=row.get("ranks", 1)),
        versions=Versions(python="3", zerofit="0", torch=row.get("torch")),
        keeps_outputs=keeps_outputs and not row.get("longest_first", False),
        use=ModelUse(has_adapters=adapter > 0, is_own="code" in row, weight_format=format_of(model.config)),
    )
    memory = estimate_memory(setup, gpu=gpu)
    if "mean_length" in row:
        shares = _lengths(row["mean_length"]).shares(row["sequence_length"], row["micro_batch_size"])
        memory = with_ragged_batches(memory, replace(setup, shares=shares), gpu=gpu)
    others = _by_other_models(model, request, setup, row) if not adapter else {}
    return PublishedPeak(
        source=source,
        name=row["id"],
        not_known=row.get("not_known", ""),
        measured_bytes=round(row["measured"] * _UNITS[row["unit"]]) if "measured" in row else None,
        predicted_bytes=_peak(memory, row["metric"]),
        uncertainty=memory.uncertainty,
        kind=_kind(strategy, adapter, setup.use.weight_format),
        precision=str(strategy.precision),
        gpu_bytes=gpu.usable_bytes,
        is_g=row["unit"] == "G",
        doubts=tuple(row.get("doubts", ())),
        **others,
    )


def _lengths(mean: int) -> BatchLengths:
    """Return the lengths of samples whose mean alone is stated. ASSUMPTION: exponentially distributed."""
    lengths = Counter(round(-mean * math.log(1 - (part + 0.5) / _PARTS)) for part in range(_PARTS))
    return BatchLengths(counts=tuple(sorted(lengths.items())))


@contextmanager
def _shifted_logits_copied() -> Iterator[None]:
    """Compute the loss of language models as transformers 4.46 to 4.48 did: logits are shifted, into a copy.

    Source: ForCausalLMLoss, https://github.com/huggingface/transformers/blob/v4.48.1/src/transformers/loss/loss_utils.py
    """
    import torch
    from transformers.loss import loss_utils

    def loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
        logits = logits.float()  # stays until the loss is there
        shifted = logits[..., :-1, :].contiguous()
        return torch.nn.functional.cross_entropy(
            shifted.view(-1, vocab_size), labels[..., 1:].contiguous().view(-1)
        )

    original = loss_utils.LOSS_MAPPING["ForCausalLM"]
    loss_utils.LOSS_MAPPING["ForCausalLM"] = loss
    try:
        yield
    finally:
        loss_utils.LOSS_MAPPING["ForCausalLM"] = original


def _packing(row: dict[str, Any]) -> Packing:
    given = row.get("packing", {})
    unpacks_to = Precision(given["unpacks_to"]) if "unpacks_to" in given else None
    return Packing(**{**given, "unpacks_to": unpacks_to})


def _by_other_models(
    model: ModelSource, request: TraceRequest, setup: Setup, row: dict[str, Any]
) -> dict[str, int]:
    """Return what closed forms say of a case, and for other code than transformers' what its classes say."""
    gpu, metric = find_gpu(row["gpu"]), row["metric"]
    fast = closed_form_memory(
        replace(setup, log=closed_form_log(model.facts, request)),
        non_torch_terms(gpu, setup.topology, setup.versions),
        model=model.facts,
    )
    found = {"fast_bytes": _peak(fast, metric)}
    if "code" in row:
        trace = trace_model(model, request, cache_folder=_CACHE)
        by_name = replace(setup.use, is_own=False)
        instead = replace(setup, log=trace.log_for(row["micro_batch_size"]), use=by_name)
        found["by_transformers_bytes"] = _peak(estimate_memory(instead, gpu=gpu), metric)
    return found


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
            dropout=lora.get("dropout", 0.0),
        )
        if lora
        else None,
        quantization=Quantization(row["quantization"]) if "quantization" in row else None,
        buckets=_DEEPSPEED_BUCKETS if stage else Buckets(),
    )


def _kind(strategy: Strategy, adapter: int, form: WeightFormat | None) -> str:
    if adapter:
        return "LitGPT's adapters in nf4" if strategy.quantization else "LitGPT's adapters"
    kind = "QLoRA" if strategy.quantization else "LoRA" if strategy.lora else "full"
    kind = kind if form is None else f"{kind} on {form.method}"
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
        "precision": case.precision,
        "measured_bytes": case.measured_bytes,
        "predicted_bytes": case.predicted_bytes,
        "error": None if case.error is None else round(case.error, 4),
        "uncertainty": round(case.uncertainty, 4),
        "fast_bytes": case.fast_bytes,
        "by_transformers_bytes": case.by_transformers_bytes,
        "doubts": case.doubts,
    }


def _summary(cases: list[PublishedPeak]) -> dict[str, Any]:
    groups: dict[str, list[PublishedPeak]] = {}
    for case in (case for case in cases if case.error is not None):
        state = "known" if not case.not_known else "not known"
        named = [case.source, f"all {case.kind}", f"all {case.kind}, {case.precision}", "all"]
        found = dict.fromkeys(named, case)
        if case.fast_bytes is not None:
            fast = replace(case, predicted_bytes=case.fast_bytes, uncertainty=UNCERTAINTY)
            found["all, by closed forms"] = fast
        if case.by_transformers_bytes is not None:
            found["all, by transformers in LitGPT's place"] = replace(
                case, predicted_bytes=case.by_transformers_bytes
            )
        for name, one in found.items():
            groups.setdefault(f"{name}: what is {state}", []).append(one)
    return {name: _errors_of(groups[name]) for name in sorted(groups)}


def _errors_of(cases: list[PublishedPeak]) -> dict[str, Any]:
    known = [(case.error, case.uncertainty) for case in cases if case.error is not None]
    return errors_of([error for error, _ in known], [abs(error) <= most for error, most in known])


_FEWEST = 5
"""Cases of other sources that an uncertainty is made of at least."""


def left_out(cases: list[PublishedPeak]) -> list[dict[str, Any]]:
    """Return, by source and class, how an uncertainty that the other sources give covers it.

    The other sources' 90th percentile of the same training and precision is taken; of the same training, or
    of all of them, where that leaves fewer than _FEWEST cases. Cases of which all is known count.
    """
    known = [case for case in cases if case.error is not None and not case.not_known]
    found = []
    for key in sorted({(case.source, case.kind, case.precision) for case in known}):
        source, kind, precision = key
        held = [case for case in known if (case.source, case.kind, case.precision) == key]
        others = [case for case in known if case.source != source]
        classes = {
            "same training and precision": [
                case for case in others if (case.kind, case.precision) == (kind, precision)
            ],
            "same training": [case for case in others if case.kind == kind],
            "all": others,
        }
        taken = next((name for name, group in classes.items() if len(group) >= _FEWEST), None)
        if taken is None:
            continue
        share = _errors_of(classes[taken])["90th_percentile"]
        found.append(
            {
                "source": source,
                "class": f"{kind}, {precision}",
                "cases": len(held),
                "by": f"{len(classes[taken])} cases of other sources, {taken}",
                "uncertainty_of_others": share,
                "inside_it": _errors_of([replace(case, uncertainty=share) for case in held])[
                    "share_within_uncertainty"
                ],
                "stated": held[0].uncertainty,
                "inside_stated": _errors_of(held)["share_within_uncertainty"],
            }
        )
    return found


if __name__ == "__main__":
    main()
