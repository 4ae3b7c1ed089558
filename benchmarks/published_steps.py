"""Predict the published times of training steps, over the traces that plans use. It needs no GPU.

Prints each step with its prediction, then the errors by strategy, and writes them to
measured/published_steps.json where all were predicted. A step by which a rate of rates.toml was chosen is
shown and not counted, but where another source gives the same rate.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zerofit.core.allocation_log import AllocationLog, TraceRequest
from zerofit.core.estimates import StepTime
from zerofit.core.facts import Machine, Versions, Workload
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, Lora, OffloadDevice, OptimizerName, Precision, Strategy, ZeroStage
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.machine.rates import catalog_rates
from zerofit.models.find import probe_model
from zerofit.models.task import Task
from zerofit.models.trace.cache import default_cache_folder
from zerofit.models.trace.entry import trace_model
from zerofit.planning.estimate.closed_form.log import closed_form_log
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.estimate.model_use import ModelUse
from zerofit.planning.estimate.step_time import estimate_step_time
from zerofit.planning.trace_request import trace_request_for

if TYPE_CHECKING:
    from collections.abc import Sequence

OUT = Path(__file__).parent / "measured" / "published_steps.json"
CACHE = default_cache_folder(os.environ, Path.home())
_VERSIONS = Versions(python="3.11", zerofit="0")


@cache
def closed_form_of(model: str, request: TraceRequest, task: Task | None = None) -> AllocationLog:
    """Return the closed-form log of a model of the catalog."""
    return closed_form_log(probe_model(model, is_fast=True, task=task).facts, request)


def machine_of(gpu: str, gpus_per_node: int = 1, *, node_bytes_per_s: float | None = None) -> Machine:
    """Return a node with these GPUs and much of everything else."""
    return Machine(
        gpus=(find_gpu(gpu),) * gpus_per_node,
        num_cpu_cores=64,
        host_memory_bytes=10**12,
        host_memory_available_bytes=10**12,
        node_bytes_per_s=node_bytes_per_s,
    )


def time_of(
    model: str,
    strategy: Strategy,
    machine: Machine,
    *,
    sequence_length: int,
    num_nodes: int = 1,
    attention: str | None = None,
    task: Task | None = None,
    lora: Lora | None = None,
) -> StepTime:
    """Return the time of a step by closed forms, of what the strategy's engine and precision make of it."""
    precision = strategy.precision or Precision.FP32
    is_half = precision is not Precision.FP32
    keeps_half = is_half and (strategy.engine is Engine.DEEPSPEED or lora is not None)
    request = TraceRequest(
        sequence_length=sequence_length,
        is_padded=False,
        weights=precision if keeps_half else Precision.FP32,
        autocast=precision if is_half and strategy.engine is Engine.NATIVE else None,
        gradient_checkpointing=bool(strategy.gradient_checkpointing),
        attention=attention,
        lora=lora,
    )
    setup = Setup(
        log=closed_form_of(model, request, task),
        strategy=replace(strategy, lora=lora),
        topology=Topology(num_nodes=num_nodes, world_size=num_nodes * len(machine.gpus)),
        versions=_VERSIONS,
    )
    found = estimate_step_time(setup, machine=machine, rates=catalog_rates())
    assert found is not None
    return found


class PublishedStep(NamedTuple):
    """A published step."""

    name: str
    source: str
    seconds: float
    model: str
    gpu: str
    length: int
    strategy: Strategy
    gpus: int = 1
    nodes: int = 1
    rank: int = 0
    """Of LoRA; 0 without."""
    targets: tuple[str, ...] = ()
    """Modules that LoRA adapts."""
    saved: tuple[str, ...] = ()
    """Modules that train whole beside the adapters."""
    weights: Precision = Precision.FP32
    """Format that the script loaded the weights in."""
    adapters: Precision | None = None
    """Format of LoRA's adapters and of what trains beside them, where it is not today's."""
    decided: str = ""
    """The rate that no other source decides; empty where the prediction owes it nothing."""
    not_known: str = ""
    """What the source does not state of the run."""

    @property
    def kind(self) -> str:
        """The strategy that its error counts for."""
        how = "LoRA" if self.rank else "full"
        if self.strategy.optimizer_offload is OffloadDevice.CPU:
            return f"{how}, optimizer on the CPU"
        if self.strategy.engine is Engine.NATIVE:
            return f"{how}, one GPU"
        return f"{how}, ZeRO-{self.strategy.zero_stage}"


def _strategy(micro: int, steps: int, precision: Precision, **more: object) -> Strategy:
    return Strategy(micro_batch_size=micro, gradient_accumulation_steps=steps, precision=precision, **more)  # type: ignore[arg-type]


def _bert(name: str, train_runtime: float, *fields: object, **more: object) -> PublishedStep:
    # 512 samples, four to a step.
    # https://github.com/huggingface/transformers/blob/0ad5fe67b294/docs/source/performance.mdx
    decided = str(more.pop("decided", ""))
    strategy = _strategy(*fields, **more)  # type: ignore[arg-type]
    seconds = train_runtime / 128
    return PublishedStep(name, _HF, seconds, "bert-large-uncased", "V100-16G", 512, strategy, decided=decided)


def _squad(micro: int, samples_per_s: float) -> PublishedStep:
    # https://github.com/microsoft/DeepSpeed/blob/38327e07f6cd/docs/_tutorials/bert-finetuning.md, V100 32 GB
    strategy = _strategy(micro, 1, _FP16, engine=Engine.DEEPSPEED, optimizer=OptimizerName.ADAMW)
    seconds = micro / samples_per_s
    decided = "matrix products in 16 bit before Ampere"
    name = f"squad batch {micro}"
    return PublishedStep(
        name, _DEEPSPEED, seconds, "bert-large-uncased", "V100-16G", 384, strategy, decided=decided
    )


def _titan(name: str, tokens_per_s: float, nodes: int, *, is_compiled: bool) -> PublishedStep:
    # FSDP2 in the place of ZeRO-3, selective checkpointing in the place of full.
    # https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md
    strategy = _strategy(
        2,
        1,
        _BF16,
        **_STAGE_3,
        optimizer=OptimizerName.ADAMW,
        gradient_checkpointing=True,
        compile=is_compiled,
    )
    return PublishedStep(
        name, _TITAN, 2 * 8192 / tokens_per_s, "llama-3-8b", "H100-80G", 8192, strategy, 8, nodes
    )


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_ALL_LINEAR = (*_ATTENTION, "gate_proj", "up_proj", "down_proj")


def _qwen(
    seconds: float,
    size: str,
    length: int,
    *,
    rank: int = 0,
    saves: bool = False,
    gpus: int = 1,
    decided: str = "",
    **more: object,
) -> PublishedStep:
    # https://github.com/QwenLM/Qwen/blob/2df8e8ac450f/README.md, "Profiling of Memory and Speed"
    name = f"qwen-{size} {'lora' if rank else 'full'} {length}{', embeddings' if saves else ''}"
    strategy = _strategy(1, 8, _BF16, gradient_checkpointing=True, **more)
    gpu = "A100-80G"
    return PublishedStep(
        name,
        _QWEN,
        seconds,
        f"qwen-{size}",
        gpu,
        length,
        strategy,
        gpus,
        rank=rank,
        targets=_ALL_LINEAR if rank else (),
        saved=("embed_tokens", "lm_head") if saves else (),
        adapters=_BF16 if rank else None,  # as peft made them before 0.11
        decided=decided,
    )


def _offloaded(
    name: str, source: str, seconds: float, model: str, gpu: str, gpus: int, **more: object
) -> PublishedStep:
    strategy = _strategy(1, 1, _BF16, gradient_checkpointing=True, **more)
    unknown = "batch, length, and the host's bandwidth: read as 1 x 512 tokens and 100 GB/s"
    return PublishedStep(name, source, seconds, model, gpu, 512, strategy, gpus, not_known=unknown)


def _fms(
    micro: int, train_runtime: float, *, model: str = "mistral-7b-v0.1", trains: str = "lora", **more: object
) -> PublishedStep:
    # 100 steps on one A100 with flash attention 2, transformers 4.48.1; Liger's with 4.45.2.
    # https://github.com/foundation-model-stack/fms-acceleration/blob/876e2ed6fc4e/scripts/benchmarks/refs/a100_80gb.csv
    # and a100_80gb_liger.csv
    attention = "flash_attention_2"
    strategy = _strategy(micro, 1, _BF16, gradient_checkpointing=True, attention=attention, **more)
    name, seconds = f"{model.removesuffix('-v0.1')} {trains} batch {micro}", train_runtime / 100
    adapters: dict[str, Any] = {} if trains.startswith("full") else {"rank": 16, "targets": _ATTENTION}
    return PublishedStep(name, _FMS, seconds, model, "A100-80G", 4096, strategy, weights=_BF16, **adapters)


def _mixtral(micro: int, train_runtime: float) -> PublishedStep:
    # Of the same table: Mixtral-8x7B on two A100.
    step = _fms(micro, train_runtime)
    return step._replace(
        name=f"mixtral-8x7b lora batch {micro}",
        model="mixtral-8x7b",
        strategy=replace(step.strategy, **_STAGE_3),
        gpus=2,
        not_known="FSDP in the place of ZeRO-3, and experts in the loop of transformers 4",
    )


_HF, _DEEPSPEED = "Hugging Face, performance page (2022)", "DeepSpeed, BERT fine-tuning tutorial"
_TITAN, _QWEN = "torchtitan, Llama 3 on H100", "Qwen, README: profiling of memory and speed"
_AUTOMODEL = "NVIDIA, NeMo AutoModel beside transformers 5 (2026)"
"""Qwen3-30B-A3B by transformers 5 on 8 H100, batch 1 of 4096 tokens: 3075 tokens/s a GPU. FSDP2 in the place
of ZeRO-3. https://aigcross.com/en/article/accelerating-transformers-fine-tuning-with-nvidia-nemo-automodel-23ef4f"""
_ZENFLOW = "ZenFlow, announcement (2025)"
"""Fine-tuning Llama-2-7B on 4 A100: 0.5 s a step, "over 7 s" with full offloading. https://newszed.com/?p=87253"""
_CORES = "DeepSpeed, pull request 7474"
"""Qwen2.5-3B on two A100 of 40 GB and 128 cores, with and without cores bound to ranks.
https://github.com/deepspeedai/DeepSpeed/pull/7474"""
_FMS = "fms-acceleration, benchmarks on A100 (December 2024 and February 2025)"
_BACK = "Hugging Face and IBM, From DeepSpeed to FSDP and back again (2024)"
"""Granite-7B, of Llama 2's dimensions, under ZeRO-3 on four A100, batch 8: 3094.5 tokens/s a GPU, 10.6 s.
https://github.com/huggingface/blog/blob/09e9aa2d9b04/deepspeed-to-fsdp-and-back.md"""
_DISPATCH, _HOOK = "dispatch of an operator", "gather of a module"
_FP32, _FP16, _BF16 = Precision.FP32, Precision.FP16, Precision.BF16
_STAGE_3: dict[str, Any] = {"engine": Engine.DEEPSPEED, "zero_stage": ZeroStage.PARAMETERS}
_STAGE_2: dict[str, Any] = {
    "engine": Engine.DEEPSPEED,
    "zero_stage": ZeroStage.GRADIENTS,
    "optimizer": OptimizerName.ADAMW,
}
_ON_CPU: dict[str, Any] = {**_STAGE_2, "optimizer_offload": OffloadDevice.CPU}
CASES = (
    _bert("bert vanilla", 57.82, 4, 1, _FP32),
    _bert("bert accumulation", 66.03, 1, 4, _FP32),
    _bert("bert checkpointing", 85.47, 1, 4, _FP32, gradient_checkpointing=True),
    _bert("bert fp16", 27.46, 4, 1, _FP16),
    _bert("bert fp16 checkpointing", 50.76, 1, 4, _FP16, gradient_checkpointing=True, decided=_DISPATCH),
    _bert("bert adafactor", 64.31, 4, 1, _FP32, optimizer=OptimizerName.ADAFACTOR),
    _bert("bert 8-bit adam", 55.95, 4, 1, _FP32, optimizer=OptimizerName.ADAMW_8BIT),
    _squad(4, 37.78),
    _squad(6, 43.81),
    _squad(12, 49.32),
    _titan("llama 8", 5762, 1, is_compiled=False),
    _titan("llama 8 compiled", 6667, 1, is_compiled=True),
    _titan("llama 128", 5605, 16, is_compiled=False),
    _titan("llama 128 compiled", 6514, 16, is_compiled=True),
    _qwen(2.1, "1.8b", 256, decided=_HOOK, **_STAGE_3),
    _qwen(2.2, "1.8b", 1024, **_STAGE_3),
    _qwen(2.8, "1.8b", 4096, **_STAGE_3),
    _qwen(5.6, "1.8b", 8192, **_STAGE_3),
    _qwen(4.0, "7b", 256, gpus=2, decided=_HOOK, **_STAGE_3),
    _qwen(4.0, "7b", 512, gpus=2, **_STAGE_3),
    _qwen(1.0, "1.8b", 256, rank=64, saves=True, decided=_DISPATCH),
    _qwen(1.0, "1.8b", 512, rank=64, saves=True, decided=_DISPATCH),
    _qwen(1.1, "1.8b", 1024, rank=64, decided=_DISPATCH),
    _qwen(1.1, "1.8b", 1024, rank=64, saves=True, decided=_DISPATCH),
    _qwen(3.4, "1.8b", 4096, rank=64, saves=True),
    _qwen(6.8, "1.8b", 8192, rank=64),
    _qwen(1.4, "7b", 256, rank=64, saves=True, decided=_DISPATCH),
    _qwen(1.5, "7b", 512, rank=64, decided=_DISPATCH),
    _qwen(1.6, "7b", 512, rank=64, saves=True, decided=_DISPATCH),
    _qwen(2.9, "7b", 1024, rank=64, saves=True),
    _qwen(5.2, "7b", 2048, rank=64),
    _qwen(21.3, "7b", 8192, rank=64),
    _qwen(1.6, "14b", 256, rank=64, decided=_DISPATCH),
    _qwen(1.7, "14b", 256, rank=64, saves=True, decided=_DISPATCH),
    _qwen(2.4, "14b", 512, rank=64),
    _qwen(4.4, "14b", 1024, rank=64),
    _qwen(17.0, "14b", 4096, rank=64),
    _qwen(36.0, "14b", 8192, rank=64),
    _fms(4, 492.8771),
    _fms(8, 977.0384),
    _fms(4, 535, trains="full"),
    _fms(8, 1043, trains="full"),
    _fms(8, 961.3168, model="llama-3-8b", trains="full, Liger", liger=True),
    _fms(8, 844.8273, model="llama-3-8b", trains="lora, Liger", liger=True),
    _mixtral(2, 521.3771),
    _mixtral(4, 893.1647),
    PublishedStep(
        "granite-7b",
        _BACK,
        10.6,
        "llama-2-7b",
        "A100-80G",
        4096,
        _strategy(8, 1, _BF16, **_STAGE_3, optimizer=OptimizerName.ADAMW, gradient_checkpointing=True),
        4,
        not_known="length and checkpointing: read as 4096 by tokens a second, and as on, or it would not fit",
    ),
    PublishedStep(
        "qwen3-30b-a3b",
        _AUTOMODEL,
        4096 / 3075,
        "qwen3-30b-a3b",
        "H100-80G",
        4096,
        _strategy(1, 1, _BF16, **_STAGE_3, optimizer=OptimizerName.ADAMW),
        8,
        not_known="whether layers are checkpointed: read as not",
    ),
    _offloaded("zenflow llama-2-7b", _ZENFLOW, 0.5, "llama-2-7b", "A100-80G", 4, **_STAGE_2),
    _offloaded("zenflow llama-2-7b offload", _ZENFLOW, 7.0, "llama-2-7b", "A100-80G", 4, **_ON_CPU),
    _offloaded("qwen2.5-3b offload", _CORES, 3.084, "qwen2.5-3b", "A100-40G", 2, **_ON_CPU),
    _offloaded("qwen2.5-3b offload, bound", _CORES, 2.383, "qwen2.5-3b", "A100-40G", 2, **_ON_CPU),
)


def estimated(case: PublishedStep) -> StepTime:
    """Return the estimate of a published step, over the trace that a plan would use."""
    is_bert = case.model.startswith("bert")
    lora = None
    if case.rank:
        lora = Lora(rank=case.rank, target_modules=case.targets, modules_to_save=case.saved)
    attention = "eager" if is_bert else case.strategy.attention
    strategy = replace(case.strategy, lora=lora, attention=attention)
    machine = machine_of(case.gpu, case.gpus, node_bytes_per_s=400e9)
    workload = Workload(sequence_length=case.length, is_padded=False)
    source = probe_model(case.model, task=Task.SEQUENCE_CLASSIFICATION if is_bert else None)
    request = trace_request_for(strategy, workload, machine.gpus[0], use=ModelUse(weights=case.weights))
    if case.adapters is not None:
        request = replace(request, adapters=case.adapters, saved_modules=case.adapters)
    trace = trace_model(source, request, cache_folder=CACHE)
    setup = Setup(
        log=trace.log_for(strategy.micro_batch_size or 1),
        strategy=strategy,
        topology=Topology(num_nodes=case.nodes, world_size=case.nodes * case.gpus),
        versions=_VERSIONS,
    )
    found = estimate_step_time(setup, machine=machine, rates=catalog_rates())
    assert found is not None
    return found


def row_of(case: PublishedStep) -> dict[str, Any]:
    """Return a step with its prediction."""
    estimate = estimated(case)
    return {
        "id": case.name,
        "source": case.source,
        "kind": case.kind,
        "decided": case.decided,
        "not_known": case.not_known,
        "measured_s": round(case.seconds, 3),
        "predicted_s": round(estimate.seconds, 3),
        "error": round(estimate.seconds / case.seconds - 1, 4),
        "uncertainty": estimate.uncertainty,
    }


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors by strategy."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not row["decided"]:
            state = "what is not known" if row["not_known"] else "what is known"
            for name in (row["kind"], "all"):
                groups.setdefault(f"{name}: {state}", []).append(row)
    summary = {}
    for name in sorted(groups):
        errors = [row["error"] for row in groups[name]]
        within = [abs(1 / (1 + row["error"]) - 1) <= row["uncertainty"] for row in groups[name]]
        summary[name] = errors_of(errors, within)
    return summary


def errors_of(errors: Sequence[float], within: Sequence[bool]) -> dict[str, Any]:
    """Return how far predictions are off, as shares; absolute but for worst and bias.

    Args:
        errors: relative, positive where too much was predicted.
        within: by case, if the measurement lies within the prediction's uncertainty.
    """
    ordered = sorted(errors, key=abs)
    numbers = {
        "median": statistics.median(map(abs, ordered)),
        "90th_percentile": abs(ordered[math.ceil(0.9 * len(ordered)) - 1]),
        "95th_percentile": abs(ordered[math.ceil(0.95 * len(ordered)) - 1]),
        "worst": ordered[-1],
        "bias": statistics.mean(ordered),
        "share_within_uncertainty": sum(within) / len(within),
    }
    return {"cases": len(ordered), **{name: round(number, 4) for name, number in numbers.items()}}


def main() -> None:
    """Predict the named steps, or all, and write them down."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("names", nargs="*", metavar="ID", help="steps; default: all")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"default: {OUT.name}")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if not arguments.names or case.name in arguments.names:
            rows.append(row_of(case))
            print(_line(rows[-1]), flush=True)
    summary = summary_of(rows)
    print(json.dumps(summary, indent=2))
    if not arguments.names:
        text = json.dumps({"summary": summary, "cases": rows}, indent=1) + "\n"
        arguments.out.write_text(text, encoding="utf-8")


def _line(row: dict[str, Any]) -> str:
    left_out = f"   decided the rate of {row['decided']}" if row["decided"] else ""
    unknown = f"   not known: {row['not_known']}" if row["not_known"] else ""
    return (
        f"{row['id']:32} {row['measured_s']:8.3f} s  {row['predicted_s']:8.3f} s  "
        f"{row['error']:+7.1%}{left_out}{unknown}"
    )


if __name__ == "__main__":
    main()
