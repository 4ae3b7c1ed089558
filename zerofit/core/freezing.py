"""Frozen parameters: keywords and shell patterns, resolved to parameter names."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EMBEDDINGS = "embeddings"
"""Keyword for all embeddings; "+N" appended also freezes the first N blocks of each stack."""
ALL_BUT_HEAD = "all-but-head"
"""Keyword for the whole base model."""
BLOCKS = "blocks"
"""Keyword for every block of every stack; what comes before and after them trains."""
WORDS = (EMBEDDINGS, f"{EMBEDDINGS}+N", BLOCKS, ALL_BUT_HEAD)
"""Keywords, as opposed to patterns."""
EMBEDDING_PATTERNS = (
    "*embedding*",
    "*embed_tokens*",
    "*embed_positions*",
    "*embed_in*",
    "*wte.*",
    "*wpe.*",
    "*shared.weight",
)
"""Embeddings of the catalog's model families. GPT-NeoX's embed_out is its head, and the shared experts of
Qwen and DeepSeek are no embeddings."""
_STACK_NAMES = frozenset({"layer", "layers", "h", "block", "blocks"})
"""These families' names for their list of blocks, so that a list of one block is recognized."""
_AND_BLOCKS = re.compile(rf"{EMBEDDINGS}\+(\d+)")

Stacks = dict[str, int]
"""Prefix of each stack's parameter names, and its number of blocks: {"bert.encoder.layer": 12}."""


def frozen_names(
    names: Iterable[str], freeze: Sequence[str], *, base_prefix: str | None = None
) -> frozenset[str]:
    """Return the names of the parameters to freeze.

    Args:
        names: of all parameters, from model.named_parameters().
        freeze: keywords ("embeddings", "embeddings+6", "blocks", "all-but-head") and shell patterns.
        base_prefix: transformers' base_model_prefix; "" if the whole model is the base; None if unknown or
            not followed by the class: the base is then every outermost part with embeddings or a stack of
            blocks.
    """
    every = tuple(names)
    return frozenset().union(*(matches(every, word, base_prefix=base_prefix) for word in freeze))


def matches(names: Sequence[str], word: str, *, base_prefix: str | None = None) -> frozenset[str]:
    """Return the names that one keyword or pattern selects.

    Args:
        names: of all parameters.
        word: one item of Strategy.freeze.
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
    """Return True if an item of Strategy.freeze is a keyword rather than a pattern."""
    return said in (BLOCKS, ALL_BUT_HEAD) or num_frozen_blocks(said) is not None


def num_frozen_blocks(word: str) -> int | None:
    """Return how many blocks per stack a keyword for embeddings freezes too; None for other keywords."""
    if word == EMBEDDINGS:
        return 0
    found = _AND_BLOCKS.fullmatch(word)
    return int(found[1]) if found else None


def stacks_of(names: Iterable[str]) -> Stacks:
    """Return the outermost stacks of blocks: numbered submodules of equal structure that have submodules.

    The experts of a mixture are inside a block and belong to it; the numbered layers of a
    torch.nn.Sequential are no blocks, as they have no submodules.
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
    """Return the names in the first num_blocks blocks of each stack, or in all."""
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
    """Return for each number in a dotted name: the part before it, the number, the part after it."""
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
"""Named choices of frozen parameters, those with the least effect on training first."""
