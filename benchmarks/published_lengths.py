"""Predict the longest samples that others trained on H100s, with the ranks of a node sharing them or not.

Of each case: what zerofit estimates for a GPU at the published length, and the length at which that is the
whole GPU. Activations grow evenly with the length, so that two estimates give the line. It needs no GPU.

Source: Arctic Long Sequence Training (https://arxiv.org/abs/2506.13996) and the recipes of its authors, which
hold the largest length of each step of the ablation:
https://github.com/snowflakedb/ArcticTraining/tree/main/projects/sequence-parallelism
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zerofit.core.facts import Versions, Workload
from zerofit.core.plan import Topology
from zerofit.core.strategy import Buckets, Engine, OffloadDevice, Precision, Strategy, ZeroStage
from zerofit.core.units import GIB
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.models.find import probe_model
from zerofit.models.trace.cache import default_cache_folder
from zerofit.models.trace.entry import trace_model
from zerofit.planning.estimate.device_memory.memory import estimate_memory
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.trace_request import trace_request_for

OUT = Path(__file__).parent / "measured" / "published_lengths.json"
MODEL, GPU = "llama-3.1-8b", "H100-80G"
_TINY_VOCABULARY = 1024
"""Stands for logits that are never whole: Liger's fused loss makes them in pieces."""
_BASE = Strategy(
    engine=Engine.DEEPSPEED,
    zero_stage=ZeroStage.PARAMETERS,
    optimizer_offload=OffloadDevice.CPU,
    precision=Precision.BF16,
    micro_batch_size=1,
    gradient_accumulation_steps=1,
    gradient_checkpointing=True,
    attention="flash_attention_2",
    buckets=Buckets(reduce_bucket_size=500_000_000),
)
"""ZeRO-3 with the optimizer on the host, checkpointing and flash attention 2, as in all recipes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One recipe."""

    name: str
    """Of its file, without what all share."""
    sequence_length: int
    """The largest that its authors ran."""
    ranks: int = 1
    sequence_parallel_size: int = 1
    offloads_weights: bool = False
    tiles_logits: bool = False
    """True with Liger's fused loss."""


CASES = (
    Published(name="sp1 baseline", sequence_length=36_000, offloads_weights=True),
    Published(name="sp8 no-ulysses no-liger", sequence_length=32_000, ranks=8),
    Published(name="sp8 no-ulysses yes-liger", sequence_length=160_000, ranks=8, tiles_logits=True),
    Published(
        name="sp8 no-mlp no-act-offload",
        sequence_length=1_100_000,
        ranks=8,
        sequence_parallel_size=8,
        tiles_logits=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What was predicted of a recipe."""

    name: str
    published_length: int
    predicted_bytes: int
    """Of each GPU at that length."""
    predicted_length: int
    """The length at which each GPU is full."""
    error: float
    """Of the length, relative; positive where too much was predicted to fit."""
    without_tiling: int | None
    """The same with whole logits, as zerofit trains; None where the recipe has whole ones."""


def predict(case: Published) -> Predicted:
    """Return what is predicted of a recipe."""
    length, whole = _longest(case), None
    if case.tiles_logits:
        whole = _longest(replace(case, tiles_logits=False))
    return Predicted(
        name=case.name,
        published_length=case.sequence_length,
        predicted_bytes=_bytes(case, case.sequence_length),
        predicted_length=length,
        error=length / case.sequence_length - 1,
        without_tiling=whole,
    )


def _longest(case: Published) -> int:
    """Return the length at which a GPU is full, by the line through two lengths."""
    lengths = case.sequence_length // 2, case.sequence_length
    low, high = (_bytes(case, length) for length in lengths)
    each = (high - low) / (lengths[1] - lengths[0])
    return int(lengths[1] + (find_gpu(GPU).usable_bytes - high) / each)


def _bytes(case: Published, sequence_length: int) -> int:
    gpu, source = find_gpu(GPU), probe_model(MODEL)
    config = {**source.config, "max_position_embeddings": 2 * sequence_length}
    if case.tiles_logits:
        config["vocab_size"] = _TINY_VOCABULARY
    source = replace(source, config=config, facts=replace(source.facts, max_sequence_length=None))
    topology = Topology(world_size=case.ranks, sequence_parallel_size=case.sequence_parallel_size)
    strategy = _BASE
    if case.offloads_weights:
        strategy = replace(strategy, param_offload=OffloadDevice.CPU)
    workload = Workload(sequence_length=sequence_length, is_padded=False)
    request = trace_request_for(strategy, workload, gpu, topology=topology)
    trace = trace_model(source, request, cache_folder=default_cache_folder(os.environ, Path.home()))
    setup = Setup(
        log=trace.log_for(1),
        strategy=strategy,
        topology=topology,
        versions=Versions(python="3", zerofit="0"),
        expandable_segments=True,
    )
    return estimate_memory(setup, gpu=gpu).peak_bytes


def line_of(one: Predicted) -> str:
    """Return a case in a line."""
    whole = "" if one.without_tiling is None else f"; {one.without_tiling:,} with whole logits"
    return (
        f"{one.name:26} {one.published_length:>9,} tokens: {one.predicted_bytes / GIB:5.1f} GiB, full at "
        f"{one.predicted_length:>9,} ({one.error:+.0%}){whole}"
    )


def main() -> None:
    """Predict the named recipes, or all, and write what was predicted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes; default: all")
    parser.add_argument("--out", type=Path, default=OUT, help="file that gets what was predicted")
    arguments = parser.parse_args()
    found = []
    for case in CASES:
        if not arguments.names or case.name in arguments.names:
            found.append(predict(case))
            print(line_of(found[-1]), flush=True)
    arguments.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
