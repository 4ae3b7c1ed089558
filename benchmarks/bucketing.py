"""Measures real tokens a second of training on ragged data: fixed padding, dynamic padding, bucketed batches.

With --shares it trains nothing, and prints what share of the tokens is padding (docs/measured-costs.md).

Each round trains the same samples in all three ways, each with a model of its own, by turns batch by batch:
the speed of a machine drifts. A way's figure is the median of its rounds. One thread computes: several would
wait for one another on a busy machine. Padding is work without use: where time goes by tokens, bucketed
batches are faster than fixed ones by the ratio of their tokens, and by more where attention counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from circumstances import circumstances

from zerofit.data import LengthGroupedBatches, pack_lengths

if TYPE_CHECKING:
    from collections.abc import Sequence

OUT = Path(__file__).parent / "measured" / "bucketing.json"
PACKAGES = ("numpy", "torch", "transformers")
WAYS = ("fixed", "dynamic", "bucketed")
MEDIAN_LENGTH, SPREAD = 40, 0.8
"""Of the lognormal distribution of lengths. ASSUMPTION: sentences and short paragraphs."""
MAX_LENGTH = 256
"""Longer samples are cut to it, and fixed padding fills up to it."""
SHARES = {
    "num_samples": 100_000,
    "median": 89,
    "spread": 0.8,
    "shortest": 4,
    "longest": 512,
    "batch_size": 32,
}
"""Lengths by which shares of padding are counted: lognormal too. ASSUMPTION: paragraphs."""
PACKED_AT_ONCE, MULTIPLE = 1000, 8
VOCABULARY_SIZE = 2000
SIZES = {"hidden": 128, "layers": 2, "heads": 4}
"""Of both models: small enough for two cores, large enough that the time goes into their products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRound:
    """One pass over the samples in one way."""

    time_s: float
    padded_tokens: int
    loss: float
    """Mean over the batches."""


def ragged_samples(num_samples: int) -> list[list[int]]:
    """Return samples of random tokens, of lognormal lengths."""
    rng = numpy.random.default_rng(0)
    lengths = numpy.exp(rng.normal(numpy.log(MEDIAN_LENGTH), SPREAD, num_samples)).astype(int)
    return [rng.integers(1, VOCABULARY_SIZE, size).tolist() for size in lengths.clip(2, MAX_LENGTH)]


def shares_of_padding() -> dict[str, tuple[float, float]]:
    """Return the share of padding by how rows are filled, and where their lengths are rounded up to 8."""
    drawn = numpy.random.default_rng(0).lognormal(
        numpy.log(SHARES["median"]), SHARES["spread"], int(SHARES["num_samples"])
    )
    lengths = numpy.rint(drawn).astype(int).clip(SHARES["shortest"], SHARES["longest"])
    size, longest = int(SHARES["batch_size"]), int(SHARES["longest"])
    order = numpy.random.default_rng(1).permutation(len(lengths))
    plain = [order[start : start + size] for start in range(0, len(order), size)]
    grouped = LengthGroupedBatches(lengths, batch_size=size)

    def share(batches: Sequence[Any], multiple: int) -> float:
        widths = [-(-int(lengths[batch].max()) // multiple) * multiple for batch in batches]
        computed = sum(width * len(batch) for width, batch in zip(widths, batches, strict=True))
        return 1 - int(lengths.sum()) / computed

    parts = [lengths[start : start + PACKED_AT_ONCE] for start in range(0, len(lengths), PACKED_AT_ONCE)]
    packed = 1 - lengths.sum() / (longest * sum(len(pack_lengths(part.tolist(), longest)) for part in parts))
    fixed = 1 - lengths.mean() / longest
    by_batches = {"dynamic": plain, "bucketed": list(grouped)}
    dynamic = {way: (share(batches, 1), share(batches, MULTIPLE)) for way, batches in by_batches.items()}
    return {"fixed": (fixed, fixed), **dynamic, "packed": (packed, packed)}


def models() -> dict[str, Any]:
    """Return both models, untrained."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    bert = BertConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=SIZES["hidden"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        intermediate_size=4 * SIZES["hidden"],
        max_position_embeddings=MAX_LENGTH,
    )
    gpt2 = GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_embd=SIZES["hidden"],
        n_layer=SIZES["layers"],
        n_head=SIZES["heads"],
        n_positions=MAX_LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    return {"BERT, classifier": BertForSequenceClassification(bert), "GPT-2": GPT2LMHeadModel(gpt2)}


def collated(samples: Sequence[list[int]], *, width: int, is_causal: bool) -> dict[str, Any]:
    """Return one batch, filled up to a width."""
    import torch

    ids = torch.zeros(len(samples), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(samples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    labels = ids.masked_fill(mask == 0, -100) if is_causal else ids[:, 0] % 2
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches_of(way: str, samples: list[list[int]], *, batch_size: int, epoch: int) -> list[list[int]]:
    """Return the samples of each batch: in any order, or of like length."""
    if way == "bucketed":
        grouped = LengthGroupedBatches([len(tokens) for tokens in samples], batch_size=batch_size)
        grouped.set_epoch(epoch)
        return list(grouped)
    order = numpy.random.default_rng(epoch).permutation(len(samples)).tolist()
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def train_step(
    model: Any, optimizer: Any, samples: Sequence[list[int]], *, way: str
) -> tuple[float, int, float]:
    """Train one batch; return seconds (collating costs, too), tokens with padding, and loss."""
    started = time.perf_counter()
    width = MAX_LENGTH if way == "fixed" else max(len(tokens) for tokens in samples)
    loss = model(**collated(samples, width=width, is_causal=hasattr(model, "lm_head"))).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - started, width * len(samples), loss.item()


def train_round(
    trainers: dict[str, tuple[Any, Any]], samples: list[list[int]], *, batch_size: int, epoch: int
) -> dict[str, TrainingRound]:
    """Train one pass over the samples in each way; the time of making the batches counts."""
    batches, times, tokens = {}, {}, {}
    losses: dict[str, list[Any]] = {}
    for way in WAYS:
        started = time.perf_counter()
        batches[way] = batches_of(way, samples, batch_size=batch_size, epoch=epoch)
        times[way], tokens[way], losses[way] = time.perf_counter() - started, 0, []
    for number in range(len(batches[WAYS[0]])):
        turn = number % len(WAYS)
        for way in (*WAYS[turn:], *WAYS[:turn]):
            chosen = [samples[index] for index in batches[way][number]]
            time_s, padded_tokens, loss = train_step(*trainers[way], chosen, way=way)
            times[way] += time_s
            tokens[way] += padded_tokens
            losses[way].append(loss)
    return {
        way: TrainingRound(time_s=times[way], padded_tokens=tokens[way], loss=statistics.fmean(losses[way]))
        for way in WAYS
    }


def measure(
    samples: list[list[int]], *, batch_size: int, num_rounds: int
) -> dict[str, dict[str, list[TrainingRound]]]:
    """Return the rounds of each way, by model; one before them, on a few batches, is not counted."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, dict[str, list[TrainingRound]]] = {}
    for name in models():
        trainers = {}
        for way in WAYS:
            model = models()[name]
            trainers[way] = (model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        train_round(trainers, samples[: 4 * batch_size], batch_size=batch_size, epoch=0)
        rounds: dict[str, list[TrainingRound]] = {way: [] for way in WAYS}
        for number in range(num_rounds):
            for way, done in train_round(trainers, samples, batch_size=batch_size, epoch=number).items():
                rounds[way].append(done)
                print(f"{name}, round {number + 1}: {way} {done.time_s:.2f} s", file=sys.stderr, flush=True)
        found[name] = rounds
    return found


def summary(rounds: dict[str, list[TrainingRound]], real_tokens: int) -> dict[str, Any]:
    """Return what the rounds of one model come to."""
    ways = {
        way: {
            "padding": 1 - real_tokens * len(done) / sum(one.padded_tokens for one in done),
            "real_tokens_per_s": real_tokens / statistics.median(one.time_s for one in done),
            "time_s": [one.time_s for one in done],
            "loss": [one.loss for one in done],
        }
        for way, done in rounds.items()
    }
    pairs = list(zip(*(rounds[way] for way in WAYS), strict=True))
    return {
        "ways": ways,
        "bucketed_over_fixed": {
            "tokens": statistics.fmean(
                fixed.padded_tokens / bucketed.padded_tokens for fixed, _, bucketed in pairs
            ),
            "speed": statistics.median(fixed.time_s / bucketed.time_s for fixed, _, bucketed in pairs),
        },
        "bucketed_over_dynamic": {
            "tokens": statistics.fmean(
                dynamic.padded_tokens / bucketed.padded_tokens for _, dynamic, bucketed in pairs
            ),
            "speed": statistics.median(dynamic.time_s / bucketed.time_s for _, dynamic, bucketed in pairs),
        },
    }


def print_table(found: dict[str, Any]) -> None:
    """Print one line for each model and way."""
    print(f"{'model':<18}{'padding to':<12}{'padding':>9}{'real tokens/s':>15}{'against fixed':>15}")
    for name, model in found.items():
        fixed = model["ways"]["fixed"]["real_tokens_per_s"]
        for way, row in model["ways"].items():
            speed = row["real_tokens_per_s"]
            print(f"{name:<18}{way:<12}{row['padding']:>9.1%}{speed:>15,.0f}{speed / fixed:>14.2f}x")
        ratio = model["bucketed_over_fixed"]
        print(
            f"{name}: fixed batches have {ratio['tokens']:.2f} times the tokens of bucketed ones, which "
            f"train {ratio['speed']:.2f} times as fast (median of the rounds' ratios)"
        )


def parse_args() -> argparse.Namespace:
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--num-samples", type=int, default=512, metavar="N", help="default: 512")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="default: 16")
    parser.add_argument(
        "--num-rounds", type=int, default=3, metavar="N", help="of all three ways; default: 3"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"default: {OUT.name}")
    parser.add_argument("--shares", action="store_true", help="train nothing, print shares of padding")
    args = parser.parse_args()
    if min(args.num_samples, args.batch_size, args.num_rounds) < 1:
        parser.error("--num-samples, --batch-size and --num-rounds: one at least")
    return args


def main() -> int:
    args = parse_args()
    if args.shares:
        for way, (plain, rounded) in shares_of_padding().items():
            print(f"{way:<10}{plain:>8.1%}{rounded:>8.1%} to a multiple of {MULTIPLE}")
        return 0
    samples = ragged_samples(args.num_samples)
    real_tokens = sum(map(len, samples))
    measured = measure(samples, batch_size=args.batch_size, num_rounds=args.num_rounds)
    found = {name: summary(rounds, real_tokens) for name, rounds in measured.items()}
    print_table(found)
    met = all(
        one["bucketed_over_fixed"]["speed"] >= one["bucketed_over_fixed"]["tokens"] for one in found.values()
    )
    print(f"at least the ratio of real tokens: {'yes' if met else 'no'}")
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "num_samples": args.num_samples,
        "batch_size": args.batch_size,
        "real_tokens": real_tokens,
        "lengths": {"median": MEDIAN_LENGTH, "spread": SPREAD, "longest": MAX_LENGTH},
        "sizes": SIZES,
        "models": found,
        **circumstances(*PACKAGES),
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
