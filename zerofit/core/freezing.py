"""Which parameters do not train: words and shell patterns, resolved to names."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EMBEDDINGS = "embeddings"
"""The word for all embeddings; with "+N" behind it the first N blocks of each stack are frozen too."""
ALL_BUT_HEAD = "all-but-head"
"""The word for the whole base model."""
BLOCKS = "blocks"
"""The word for every block of every stack: what stands before and behind them trains."""
WORDS = (EMBEDDINGS, f"{EMBEDDINGS}+N", BLOCKS, ALL_BUT_HEAD)
"""Words that select parameters without a pattern."""
EMBEDDING_PATTERNS = (
    "*embedding*",
    "*embed_tokens*",
    "*embed_positions*",
    "*embed_in*",
    "*wte.*",
    "*wpe.*",
    "*shared.weight",
)
"""The embeddings of the catalog's families, whose gradients and states are large and seldom matter.
GPT-NeoX's embed_out is its head, and the shared experts of Qwen and DeepSeek are none."""
_STACK_NAMES = frozenset({"layer", "layers", "h", "block", "blocks"})
"""These families' names of a list of blocks: a list of one block is then known as one, too."""
_AND_BLOCKS = re.compile(rf"{EMBEDDINGS}\+(\d+)")

Stacks = dict[str, int]
"""Prefix of each stack's names, and its number of blocks: {"bert.encoder.layer": 12}."""


def frozen_names(
    names: Iterable[str], freeze: Sequence[str], *, base_prefix: str | None = None
) -> frozenset[str]:
    """Return which parameters do not train.

    Args:
        names: of all parameters, as model.named_parameters() has them.
        freeze: words ("embeddings", "embeddings+6", "blocks", "all-but-head") and patterns as in a shell.
        base_prefix: name under which the model holds its base, transformers' base_model_prefix; "" where all
            of it is the base; None where that is not known, or the class does not keep to it: the base is
            then every outermost part that holds embeddings or a stack of blocks.
    """
    every = tuple(names)
    return frozenset().union(*(matches(every, word, base_prefix=base_prefix) for word in freeze))


def matches(names: Sequence[str], word: str, *, base_prefix: str | None = None) -> frozenset[str]:
    """Return the names that one word or pattern stands for.

    Args:
        names: of all parameters.
        word: one of Strategy.freeze.
        base_prefix: as in frozen_names.
    """
    if word == ALL_BUT_HEAD:
        return _base(names, base_prefix)
    if word == BLOCKS:
        return _blocks(names, None)
    num_blocks = num_frozen_blocks(word)
    if num_blocks is None:
        return frozenset(name for name in names if fnmatchcase(name, word))
    return _embeddings(names) | (_blocks(names, num_blocks) if num_blocks else frozenset())


def is_word(said: str) -> bool:
    """Return True if something in Strategy.freeze is a word, and no pattern."""
    return said in (BLOCKS, ALL_BUT_HEAD) or num_frozen_blocks(said) is not None


def num_frozen_blocks(word: str) -> int | None:
    """Return the blocks of each stack that a word for embeddings freezes with them; None for other words."""
    if word == EMBEDDINGS:
        return 0
    found = _AND_BLOCKS.fullmatch(word)
    return int(found[1]) if found else None


def stacks_of(names: Iterable[str]) -> Stacks:
    """Return the outermost stacks of blocks: numbered parts that are made alike, with parts of their own.

    The experts of a mixture stand within a block and count as a part of it; the numbered layers of a
    torch.nn.Sequential are no blocks, as they have no parts.
    """
    children: dict[str, dict[int, set[str]]] = {}
    for name in names:
        for prefix, index, rest in _numbers_in(name):
            children.setdefault(prefix, {}).setdefault(index, set()).add(rest)
    found = {prefix: 1 + max(blocks) for prefix, blocks in children.items() if _is_stack(prefix, blocks)}
    return {prefix: number for prefix, number in found.items() if not _is_within(prefix, found)}


def _embeddings(names: Sequence[str]) -> frozenset[str]:
    return frozenset(
        name for name in names if any(fnmatchcase(name, pattern) for pattern in EMBEDDING_PATTERNS)
    )


def _blocks(names: Sequence[str], num_blocks: int | None) -> frozenset[str]:
    """Return the names in the first so many blocks of each stack, or in all."""
    stacks = stacks_of(names)
    return frozenset(
        name
        for name in names
        if any(
            prefix in stacks and (num_blocks is None or index < num_blocks)
            for prefix, index, _ in _numbers_in(name)
        )
    )


def _base(names: Sequence[str], base_prefix: str | None) -> frozenset[str]:
    if base_prefix == "":
        return frozenset(names)
    within = frozenset(name for name in names if base_prefix and name.startswith(f"{base_prefix}."))
    if within:
        return within
    inner = (*_embeddings(names), *(f"{prefix}." for prefix in stacks_of(names)))
    parts = {name.partition(".")[0] for name in inner}
    return frozenset(name for name in names if name.partition(".")[0] in parts)


def _numbers_in(name: str) -> list[tuple[str, int, str]]:
    """Return what stands before, in and behind each number among the parts of a name."""
    parts = name.split(".")
    return [
        (".".join(parts[:place]), int(part), ".".join(parts[place + 1 :]))
        for place, part in enumerate(parts)
        if part.isdigit()
    ]


def _is_stack(prefix: str, blocks: dict[int, set[str]]) -> bool:
    if prefix.rpartition(".")[2] in _STACK_NAMES:
        return True
    known: set[str] = set()
    for rests in blocks.values():
        with_parts = {rest for rest in rests if "." in rest}
        if known & with_parts:
            return True
        known |= with_parts
    return False


def _is_within(prefix: str, stacks: Stacks) -> bool:
    return any(prefix != other and (not other or prefix.startswith(f"{other}.")) for other in stacks)


FROZEN_EMBEDDINGS = (EMBEDDINGS,)
"""Their gradients and states are large and seldom matter."""
FROZEN_LAYERS = (BLOCKS,)
"""Every transformer block: embeddings and head train."""
FREEZES = {FROZEN_EMBEDDINGS: "frozen embeddings", FROZEN_LAYERS: "frozen layers"}
"""Named choices of frozen parameters: those that change the training less come first."""
