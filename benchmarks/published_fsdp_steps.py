"""Predict the published times of steps under FSDP, by closed forms: no torch, no trace, no GPU.

Prints each step with its prediction, then the errors by engine and training, and writes them to
measured/published_fsdp_steps.json. None of them chose a rate.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from published_steps import closed_form_of, errors_of, machine_of

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    Strategy,
)
from zerofit.machine.rates import catalog_rates
from zerofit.planning.closed_form_estimator import QUANTIZED_TIME
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.estimate.step_time import estimate_step_time

if TYPE_CHECKING:
    from zerofit.core.estimates import StepTime

OUT = Path(__file__).parent / "measured" / "published_fsdp_steps.json"
_VERSIONS = Versions(python="3.11", zerofit="0")


class PublishedStep(NamedTuple):
    """A published step of one micro-batch."""

    name: str
    source: str
    seconds: float
    model: str
    gpu: str
    length: int
    strategy: Strategy
    gpus: int
    nodes: int = 1
    node_bytes_per_s: float = 400e9
    """Of the network."""
    copies: int = 1
    """Of the sharded weights, one a node."""
    is_fsdp2: bool = True
    """False for FSDP1, as which FSDP2 is predicted."""
    not_known: str = ""
    """What the source does not state of the run."""

    @property
    def kind(self) -> str:
        """The training that its error counts for."""
        how = "full" if self.strategy.lora is None else "QLoRA" if self.strategy.quantization else "LoRA"
        offload = "" if self.strategy.param_offload is OffloadDevice.NONE else ", on the CPU"
        return f"{how}{offload}, {'FSDP2' if self.is_fsdp2 else 'FSDP1'}"


def _strategy(micro: int, *, checkpoints: bool = True, **more: Any) -> Strategy:
    return Strategy(
        engine=Engine.FSDP2,
        precision=Precision.BF16,
        micro_batch_size=micro,
        gradient_accumulation_steps=1,
        gradient_checkpointing=checkpoints,
        **{"optimizer": OptimizerName.ADAMW, **more},
    )


def _titan_h100(tokens_per_s: float, nodes: int, *, is_compiled: bool) -> PublishedStep:
    # 400 Gb/s per GPU; selective checkpointing of operators, predicted as full.
    # https://github.com/pytorch/torchtitan/blob/31a17bfdb70b/benchmarks/llama3_h100_202412_torchtitan.md
    name = f"torchtitan llama-3-8b, {8 * nodes} H100{', compiled' if is_compiled else ''}"
    strategy = _strategy(2, compile=is_compiled)
    return PublishedStep(
        name, _TITAN, 2 * 8192 / tokens_per_s, "llama-3-8b", "H100-80G", 8192, strategy, 8, nodes
    )


def _titan_a100(
    model: str, length: int, micro: int, tokens_per_s: float, *, checkpoints: bool = True, every: int = 1
) -> PublishedStep:
    # 64 A100; "selective layer" is every second one.
    # https://github.com/pytorch/torchtitan/blob/041336434916/docs/performance.md
    how = "" if not checkpoints else ", checkpointing" if every == 1 else ", every second layer"
    strategy = _strategy(micro, checkpoints=checkpoints, checkpoint_every=every)
    seconds = micro * length / tokens_per_s
    unknown = "the network: read as 200 GB/s a node"
    return PublishedStep(
        f"torchtitan {model}, 64 A100{how}", _TITAN, seconds, model, "A100-80G", length, strategy, 8, 8,
        node_bytes_per_s=200e9, not_known=unknown,
    )  # fmt: skip


def _fms(model: str, micro: int, tokens_per_s: float, *, checkpoints: bool, copies: int) -> PublishedStep:
    # 128 A100 of 80 GB, hybrid sharding of a copy a node for the two smaller models.
    # https://github.com/foundation-model-stack/fms-fsdp/blob/0d319983c4b3/README.md
    strategy = _strategy(micro, checkpoints=checkpoints)
    unknown = "the network, and whether it is compiled: read as 200 GB/s a node, and as not"
    name, seconds = f"fms-fsdp {model}, 128 A100", micro * 4096 / tokens_per_s
    return PublishedStep(
        name, _FMS, seconds, model, "A100-80G", 4096, strategy, 8, 16,
        node_bytes_per_s=200e9, copies=copies, is_fsdp2=False, not_known=unknown,
    )  # fmt: skip


def _answer(
    gpu: str, gpus: int, model: str, micro: int, total_s: float, *, packs: bool, offloads: bool = False
) -> PublishedStep:
    # 1024 samples of 2048 tokens, LoRA 64 on all linear layers, so many a GPU.
    # https://github.com/AnswerDotAI/fsdp_qlora/blob/23fafdfb4af4/benchmarks_03_2024.md
    device = OffloadDevice.CPU if offloads else OffloadDevice.NONE
    strategy = _strategy(
        micro,
        lora=Lora(rank=64, target_modules=_LINEAR),
        quantization=Quantization.NF4 if packs else None,
        quant_storage=Precision.BF16 if packs else None,
        optimizer_offload=device,
        param_offload=device,
        optimizer=None if offloads else OptimizerName.ADAMW,
    )
    how = f"{'qlora' if packs else 'lora'} batch {micro}{', on the CPU' if offloads else ''}"
    seconds = total_s * micro * gpus / 1024
    return PublishedStep(
        f"answer.ai {model} {how}, {gpus} {gpu}",
        _ANSWER,
        seconds,
        model,
        gpu,
        2048,
        strategy,
        gpus,
        is_fsdp2=False,
    )


_TITAN = "torchtitan, benchmarks and performance page"
_FMS = "IBM, fms-fsdp's README"
_ANSWER = "Answer.AI, fsdp_qlora's benchmarks (March 2024)"
_BACK = "Hugging Face and IBM, From DeepSpeed to FSDP and back again (2024)"
"""Granite-7B, of Llama 2's dimensions, on four A100, batch 8: 10.4 s under FSDP1, 10.6 s under ZeRO-3.
https://github.com/huggingface/blog/blob/09e9aa2d9b04/deepspeed-to-fsdp-and-back.md"""
_AUTOMODEL = "NVIDIA, NeMo AutoModel beside transformers 5 (2026)"
"""https://aigcross.com/en/article/accelerating-transformers-fine-tuning-with-nvidia-nemo-automodel-23ef4f"""
_REFS = "fms-acceleration, benchmarks on A100 (February 2025)"
"""100 steps. https://github.com/foundation-model-stack/fms-acceleration/blob/876e2ed6fc4e/scripts/benchmarks/refs/a100_80gb.csv"""
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ATTENTION = _LINEAR[:4]


def _refs(model: str, micro: int, seconds: float, *, is_lora: bool) -> PublishedStep:
    lora = Lora(rank=16, target_modules=_ATTENTION) if is_lora else None
    how = f"{'lora' if is_lora else 'full'} batch {micro}"
    unknown = "experts in the loop of transformers 4" if "mixtral" in model else ""
    return PublishedStep(
        f"fms-acceleration {model} {how}, 2 A100", _REFS, seconds, model, "A100-80G", 4096,
        _strategy(micro, lora=lora), 2, is_fsdp2=False, not_known=unknown,
    )  # fmt: skip


CASES = (
    _titan_h100(5762, 1, is_compiled=False),
    _titan_h100(6667, 1, is_compiled=True),
    _titan_h100(5605, 16, is_compiled=False),
    _titan_h100(6514, 16, is_compiled=True),
    _titan_a100("llama-3-8b", 8192, 1, 2904, every=2),
    _titan_a100("llama-3-70b", 8192, 1, 331),
    _titan_a100("llama-2-13b", 4096, 2, 2162, checkpoints=False),
    _titan_a100("llama-2-13b", 4096, 2, 1914, every=2),
    _titan_a100("llama-2-70b", 4096, 2, 353),
    PublishedStep(
        "automodel qwen3-30b-a3b, 8 H100", _AUTOMODEL, 4096 / 3075, "qwen3-30b-a3b", "H100-80G", 4096,
        _strategy(1, checkpoints=False), 8, not_known="whether layers are checkpointed: read as not",
    ),
    _fms("llama-2-7b", 2, 3760, checkpoints=False, copies=16),
    _fms("llama-2-13b", 1, 1700, checkpoints=False, copies=16),
    _fms("llama-2-70b", 6, 380, checkpoints=True, copies=1),
    PublishedStep(
        "granite-7b, 4 A100", _BACK, 10.4, "llama-2-7b", "A100-80G", 4096, _strategy(8), 4, is_fsdp2=False,
        not_known="length and checkpointing: read as 4096 by tokens a second, and as on, or it would not fit",
    ),
    _refs("mistral-7b-v0.1", 2, 2.949755, is_lora=False),
    _refs("mixtral-8x7b", 2, 5.213771, is_lora=True),
    _answer("RTX4090", 2, "llama-2-7b", 6, 481, packs=False),
    _answer("RTX4090", 2, "llama-2-7b", 10, 466, packs=True),
    _answer("RTX4090", 2, "llama-2-70b", 2, 4399, packs=True, offloads=True),
    _answer("RTX3090", 2, "llama-2-7b", 4, 1366, packs=False),
    _answer("RTX3090", 2, "llama-2-7b", 6, 1199, packs=False),
    _answer("A100-40G", 4, "llama-2-70b", 4, 1266, packs=True),
    _answer("A100-40G", 8, "llama-2-70b", 4, 672, packs=True),
    _answer("H100-80G", 4, "llama-2-70b", 8, 667, packs=True),
)  # fmt: skip


def estimated(case: PublishedStep) -> StepTime:
    """Return the estimate of a published step."""
    strategy = case.strategy
    request = TraceRequest(
        sequence_length=case.length,
        is_padded=False,
        weights=Precision.BF16,
        gradient_checkpointing=bool(strategy.gradient_checkpointing),
        checkpoint_every=strategy.checkpoint_every,
        lora=strategy.lora,
        quantization=strategy.quantization,
    )
    setup = Setup(
        log=closed_form_of(case.model, request),
        strategy=strategy,
        topology=Topology(
            num_nodes=case.nodes, world_size=case.nodes * case.gpus, dp_replicate_size=case.copies
        ),
        versions=_VERSIONS,
    )
    machine = machine_of(case.gpu, case.gpus, node_bytes_per_s=case.node_bytes_per_s)
    found = estimate_step_time(setup, machine=machine, rates=catalog_rates())
    assert found is not None
    return found if strategy.quantization is None else replace(found, uncertainty=QUANTIZED_TIME)


def results() -> dict[str, Any]:
    """Return every step with its prediction, and the errors by engine and training."""
    rows: list[dict[str, Any]] = []
    for case in CASES:
        estimate = estimated(case)
        rows.append(
            {
                "id": case.name,
                "source": case.source,
                "kind": case.kind,
                "not_known": case.not_known,
                "measured_s": round(case.seconds, 3),
                "predicted_s": round(estimate.seconds, 3),
                "error": round(estimate.seconds / case.seconds - 1, 4),
                "uncertainty": estimate.uncertainty,
            }
        )
    summary = {}
    for name in sorted({"all", *(case.kind for case in CASES)}):
        counted = [row for row in rows if name in ("all", row["kind"])]
        within = [abs(1 / (1 + row["error"]) - 1) <= row["uncertainty"] for row in counted]
        summary[name] = errors_of([row["error"] for row in counted], within)
    return {"summary": summary, "cases": rows}


def main() -> None:
    """Predict all steps and write them down."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"default: {OUT.name}")
    out = parser.parse_args().out
    found = results()
    for row in found["cases"]:
        unknown = f"   not known: {row['not_known']}" if row["not_known"] else ""
        times = f"{row['measured_s']:8.3f} s  {row['predicted_s']:8.3f} s  {row['error']:+7.1%}"
        print(f"{row['id']:59} {times}{unknown}")
    print(json.dumps(found["summary"], indent=2))
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
