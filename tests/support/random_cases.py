"""Random cases of generation on several ranks: a number makes the same case in every process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SEED = 7
VOCABULARY = 97
"""Tokens that each model knows; odd, so that no shard of its embeddings is a whole number of rows."""
MAX_POSITIONS = 96
"""Tokens of prompt and completion together that the models with learned positions can take."""
MAX_NEW_TOKENS = 64
MAX_PROMPTS = 9
"""Per rank."""

Tokens = tuple[int, ...]


class Family(StrEnum):
    """Kinds of models, by what is different in them for generation."""

    GPT2 = "gpt2"
    """Learned positions, fused attention weights."""
    LLAMA = "llama"
    """Rotary positions, fewer heads of keys than of queries."""
    QWEN = "qwen"
    """As Llama, with biases and normed queries."""
    OPT = "opt"
    """Learned positions that begin at 2, counted from the mask."""
    BLOOM = "bloom"
    """No positions, but a bias by distance, made from the mask."""
    T5 = "t5"
    """Encoder and decoder; its padding starts the decoder."""
    BART = "bart"
    """Encoder and decoder with learned positions; its last token is forced."""

    @property
    def has_encoder(self) -> bool:
        """True if the prompt goes to an encoder, and the completion starts anew."""
        return self in (Family.T5, Family.BART)


class Search(StrEnum):
    """How the next token is found."""

    GREEDY = "greedy"
    BEAMS = "beams"
    SAMPLING = "sampling"


class Engine(StrEnum):
    """Who makes the engine that partitions the model."""

    NATIVE = "native"
    """deepspeed.initialize without an optimizer."""
    TRAINING = "training"
    """deepspeed.initialize with one; the model is in training mode, with dropout."""
    ACCELERATE = "accelerate"
    """Accelerator.prepare."""


class GivenAs(StrEnum):
    """What the prompts are to the caller."""

    LISTS = "lists"
    TENSORS = "tensors"
    BATCHES = "batches"
    """Padded tensors with masks, as a DataLoader gives."""


class Padding(StrEnum):
    """Which token pads, as the settings name it."""

    UNNAMED = "unnamed"
    OWN = "own"
    """Token 0, which prompts hold as a word too."""
    END = "end"
    """The end-of-sequence token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is to be continued."""

    tokens: Tokens
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One world that generates."""

    number: int
    world_size: int
    family: Family
    is_tied: bool
    """True if the head is the embedding's own parameter."""
    weight_seed: int
    """The first to be tried; a later one where the best two tokens are too near each other."""
    prompts: tuple[tuple[Prompt, ...], ...]
    """Of each rank; of one, where all ranks give the same."""
    search: Search
    settings: dict[str, Any]
    """Of generation, without those of special tokens."""
    ends_early: bool
    """True if a token that the model really gives is made its end-of-sequence token."""
    padding: Padding
    batch_size: int
    param_offload: bool
    """To CPU memory."""
    engine: Engine
    has_living_config: bool
    """True if transformers knows of ZeRO-3: the model is then partitioned while it is loaded."""
    keeps_small_parameters: bool
    """True if those under 100 numbers stay whole on each rank."""
    gather: str
    given_as: GivenAs
    seed: int
    num_calls: int
    """Of zerofit.generate on one engine: DeepSpeed's order of modules is complete after the first."""

    @property
    def is_shared(self) -> bool:
        """True if all ranks give the same prompts."""
        return len(self.prompts) < self.world_size

    @property
    def all_prompts(self) -> tuple[Prompt, ...]:
        """Those of all ranks, in the order of ranks."""
        return tuple(prompt for own in self.prompts for prompt in own)

    def prompts_of(self, rank: int) -> tuple[Prompt, ...]:
        """Return what a rank gives."""
        return self.prompts[0] if self.is_shared else self.prompts[rank]

    def traits(self) -> frozenset[str]:
        """Return what this case shows, in words that are the same for each case that shows it."""
        counts = [len(own) for own in self.prompts]
        if not any(counts):
            return frozenset({"no prompts at all"})
        if not self.is_shared and sum(1 for count in counts if count) == 1:
            return frozenset({f"prompts on one rank alone, {self.engine}"})
        limits = {max((prompt.max_new_tokens for prompt in own), default=0) for own in self.prompts}
        seen = {
            str(self.family): True,
            f"{self.search}, {self.engine}": True,
            f"offload={self.param_offload}, gather={self.gather}": True,
            f"given as {self.given_as}": True,
            f"{self.padding} padding": True,
            "one prompt per call": self.batch_size == 1,
            "tied head": self.is_tied,
            "early end": self.ends_early,
            "living config": self.has_living_config and self.engine is not Engine.ACCELERATE,
            "parameters kept": self.keeps_small_parameters,
            "called again": self.num_calls > 1,
            "shared prompts": self.is_shared,
            "uneven numbers of prompts": len(set(counts)) > 1,
            "uneven lengths": len(limits - {0}) > 1,
            "64 new tokens": MAX_NEW_TOKENS in limits,
            "a prompt near the last position": self._is_near_the_end(),
            "several completions": self.settings.get("num_return_sequences", 1) > 1,
        }
        return frozenset(trait for trait, is_seen in seen.items() if is_seen)

    def _is_near_the_end(self) -> bool:
        """True if some prompt would outgrow the model while it waited for the longest completion."""
        longest = max((prompt.max_new_tokens for prompt in self.all_prompts), default=0)
        ends = [len(prompt.tokens) + longest for prompt in self.all_prompts]
        return self.family in (Family.GPT2, Family.OPT) and max(ends, default=0) > MAX_POSITIONS


def make_case(number: int, *, world_size: int) -> Case:
    """Return a case."""
    draw = random.Random(f"{SEED}-{world_size}-{number}")
    family = list(Family)[number % len(Family)]
    search = draw.choices(list(Search), weights=(5, 3, 2))[0]
    ends_early = draw.random() < 0.4
    engine = draw.choices(list(Engine), weights=(5, 2, 3))[0]
    return Case(
        number=number,
        world_size=world_size,
        family=family,
        is_tied=draw.random() < 0.5,
        weight_seed=1000 * number + world_size,
        prompts=_prompts(draw, family, _counts(draw, world_size)),
        search=search,
        settings=_settings(draw, search),
        ends_early=ends_early,
        padding=draw.choice(list(Padding) if ends_early else [Padding.UNNAMED, Padding.OWN]),
        batch_size=draw.randint(1, 4),
        param_offload=draw.random() < 0.25,
        engine=engine,
        has_living_config=engine is Engine.ACCELERATE or draw.random() < 0.5,
        keeps_small_parameters=draw.random() < 0.3,
        gather=draw.choices(("never", "auto", "always"), weights=(7, 1, 2))[0],
        given_as=draw.choices(list(GivenAs), weights=(6, 2, 2))[0],
        seed=draw.randint(0, 2**31),
        num_calls=draw.choices((1, 2), weights=(6, 4))[0],
    )


def make_cases(world_size: int, num_cases: int) -> tuple[Case, ...]:
    """Return the first cases of a number of ranks."""
    return tuple(make_case(number, world_size=world_size) for number in range(num_cases))


def few_that_show_all(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return the least work that shows every trait that any of these cases has."""
    missing = frozenset[str]().union(*(case.traits() for case in cases))
    chosen: list[Case] = []
    while missing:
        best = max(cases, key=lambda case: (len(case.traits() & missing) / _work(case), -case.number))
        chosen.append(best)
        missing -= best.traits()
    return tuple(sorted(chosen, key=lambda case: case.number))


def _work(case: Case) -> float:
    """About what a case takes: forward passes on all ranks, and a new engine."""
    passes = sum(prompt.max_new_tokens for prompt in case.all_prompts) * case.num_calls
    return 60 + passes / min(case.batch_size, case.world_size)


def _counts(draw: random.Random, world_size: int) -> tuple[int, ...]:
    """Prompts of each rank; of one rank alone where all give the same."""
    kind = draw.random()
    if kind < 0.04:
        return (0,) * world_size
    if kind < 0.14:
        busy = draw.randrange(world_size)
        return tuple(draw.randint(1, MAX_PROMPTS) if rank == busy else 0 for rank in range(world_size))
    if kind < 0.26:
        return (draw.randint(1, MAX_PROMPTS),)
    return tuple(draw.randint(0, MAX_PROMPTS) for _ in range(world_size))


def _prompts(draw: random.Random, family: Family, counts: tuple[int, ...]) -> tuple[tuple[Prompt, ...], ...]:
    """Each rank has a length of its own, which most of its prompts keep to."""
    return tuple(_prompts_of_rank(draw, family, count, _new_tokens(draw)) for count in counts)


def _prompts_of_rank(
    draw: random.Random, family: Family, count: int, max_new_tokens: int
) -> tuple[Prompt, ...]:
    return tuple(
        _prompt(draw, family, max_new_tokens if draw.random() < 0.7 else _new_tokens(draw))
        for _ in range(count)
    )


def _prompt(draw: random.Random, family: Family, max_new_tokens: int) -> Prompt:
    """Make a prompt that fits the model, and now and then only just."""
    if (
        family is Family.BART
    ):  # its last token is forced: beams have no other one, and the rest of them is chance
        max_new_tokens = max(max_new_tokens, 2)
    longest = MAX_POSITIONS - (0 if family.has_encoder else max_new_tokens)
    num_tokens = longest if draw.random() < 0.12 else draw.randint(1, min(longest, 24))
    tokens = tuple(draw.randrange(VOCABULARY) for _ in range(num_tokens))
    return Prompt(tokens=tokens, max_new_tokens=max_new_tokens)


def _new_tokens(draw: random.Random) -> int:
    """Short ones are as many as long ones, and the longest is among them."""
    low, high = draw.choices(
        ((1, 4), (5, 16), (17, 48), (MAX_NEW_TOKENS, MAX_NEW_TOKENS)), weights=(9, 9, 4, 1)
    )[0]
    return draw.randint(low, high)


def _settings(draw: random.Random, search: Search) -> dict[str, Any]:
    """Settings of transformers' GenerationConfig."""
    if search is Search.GREEDY:
        return {"do_sample": False}
    if search is Search.BEAMS:
        num_beams = draw.randint(2, 4)
        return {
            "do_sample": False,
            "num_beams": num_beams,
            "num_return_sequences": draw.randint(1, num_beams),
            "early_stopping": draw.random() < 0.5,
            "length_penalty": draw.choice((1.0, 0.5, 2.0)),
        }
    return {
        "do_sample": True,
        "temperature": draw.choice((0.7, 1.0, 2.0)),
        "top_k": draw.choice((0, 5, 50)),
        "top_p": draw.choice((1.0, 0.9)),
        "num_return_sequences": draw.choice((1, 1, 3)),
    }
