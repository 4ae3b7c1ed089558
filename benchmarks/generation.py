"""Measures new tokens a second under ZeRO-3, on CPU or GPU ranks: weights layer by layer, or gathered once.

Each round generates the same prompts in both ways, by turns: the speed of a machine drifts. Gathering counts.
On the CPU each rank computes with one thread, and ranks exchange weights through the machine's memory:
between GPUs, and more so between nodes, the exchange costs another share of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from circumstances import circumstances

import zerofit

if TYPE_CHECKING:
    from collections.abc import Sequence

OUT = Path(__file__).parent / "measured" / "generation.json"
PACKAGES = ("deepspeed", "torch", "transformers")
WAYS = {"layer by layer": "never", "gathered once": "always"}
"""What is measured, with the arguments of zerofit.generate."""
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}
"""Of a Llama with 34 million parameters: its matrices, not Python, take the time on two cores."""
PROMPT_LENGTHS = (5, 9, 14, 20, 27, 35, 44, 54)
DEEPSPEED = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRound:
    """One generation of all prompts in one way."""

    time_s: float
    tokens: list[list[int]]
    """New ones of each prompt."""


def measure(*, num_rounds: int, max_new_tokens: int, on_gpus: bool) -> dict[str, list[GenerationRound]]:
    """Return the rounds of each way, on each of the ranks that run this; one before them is not counted."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend="nccl" if on_gpus else "gloo")
    num_ranks = torch.distributed.get_world_size()
    model = LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=None))
    engine = deepspeed.initialize(model=model, config=DEEPSPEED)[0]
    prompts = [torch.randint(1, SIZES["vocab_size"], (length,)).tolist() for length in PROMPT_LENGTHS]
    rounds: dict[str, list[GenerationRound]] = {way: [] for way in WAYS}
    for number in range(num_rounds + 1):
        for way in sorted(WAYS, reverse=number % 2 == 0):
            started = time.perf_counter()
            found = zerofit.generate(
                engine,
                prompts,
                max_new_tokens=max_new_tokens,
                batch_size=max(1, len(prompts) // num_ranks),
                gather=WAYS[way],
                do_sample=False,
            )
            done = GenerationRound(
                time_s=time.perf_counter() - started, tokens=[list(each.tokens) for each in found]
            )
            if number > 0:
                rounds[way].append(done)
            if torch.distributed.get_rank() == 0:
                print(f"round {number}: {way} {done.time_s:.2f} s", file=sys.stderr, flush=True)
    return rounds


def summary(rounds: dict[str, list[GenerationRound]]) -> dict[str, Any]:
    """Return what the rounds come to."""
    speeds = {
        way: [sum(map(len, one.tokens)) / one.time_s for one in measured] for way, measured in rounds.items()
    }
    ratios = [once / layers for layers, once in zip(*(speeds[way] for way in WAYS), strict=True)]
    return {
        "tokens_per_s": {way: spread(values) for way, values in speeds.items()},
        "time_s": {way: [one.time_s for one in measured] for way, measured in rounds.items()},
        "gathered_over_layers": spread(ratios),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure_on_ranks(args: argparse.Namespace) -> dict[str, list[GenerationRound]]:
    """Return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rounds.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc_per_node={args.num_ranks}", __file__, "--rounds-to", str(found)),
            *("--num-rounds", str(args.num_rounds), "--max-new-tokens", str(args.max_new_tokens)),
            *(["--gpus"] if args.gpus else []),
        ]
        on_cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        where = {} if args.gpus else on_cpu
        programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # ninja
        subprocess.run(command, env={**os.environ, **where, "PATH": programs}, check=True)
        rounds = json.loads(found.read_text(encoding="utf-8"))
    return {way: [GenerationRound(**one) for one in measured] for way, measured in rounds.items()}


def parse_args() -> argparse.Namespace:
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--num-rounds", type=int, default=5, metavar="N", help="of both ways; default: 5")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="default: 32")
    parser.add_argument("--num-ranks", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank, in place of the CPU")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"default: {OUT.name}")
    parser.add_argument("--rounds-to", type=Path, help=argparse.SUPPRESS)  # what each rank is started with
    args = parser.parse_args()
    if min(args.num_rounds, args.max_new_tokens) < 1 or args.num_ranks < 2:
        parser.error("--num-rounds and --max-new-tokens: one at least; --num-ranks: two at least")
    return args


def main() -> int:
    args = parse_args()
    if args.rounds_to is not None:
        measured = measure(num_rounds=args.num_rounds, max_new_tokens=args.max_new_tokens, on_gpus=args.gpus)
        if os.environ["RANK"] == "0":
            text = {way: [asdict(one) for one in rounds] for way, rounds in measured.items()}
            args.rounds_to.write_text(json.dumps(text), encoding="utf-8")
        return 0
    load_before = os.getloadavg()[0]
    rounds = measure_on_ranks(args)
    same = len({json.dumps(one.tokens) for measured in rounds.values() for one in measured}) == 1
    found = summary(rounds)
    for way, speed in found["tokens_per_s"].items():
        print(f"{way:<16}{speed['median']:>8.1f} tokens/s ({speed['min']:.1f} to {speed['max']:.1f})")
    ratio = found["gathered_over_layers"]
    print(f"gathered once is {ratio['median']:.2f} times as fast ({ratio['min']:.2f} to {ratio['max']:.2f})")
    print(f"the same tokens in both ways: {'yes' if same else 'no'}")
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "num_ranks": args.num_ranks,
        "on_gpus": args.gpus,
        "sizes": SIZES,
        "prompt_lengths": PROMPT_LENGTHS,
        "max_new_tokens": args.max_new_tokens,
        "same_tokens": same,
        **found,
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
        **circumstances(*PACKAGES),
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
