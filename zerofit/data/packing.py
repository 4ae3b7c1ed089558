"""Packing for causal language models: whole documents in full rows, separated by restarting positions."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.transformers import attention_of
from zerofit.data.labels import IGNORED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

APART = frozenset(
    (
        *("codegen", "ctrl", "gemma", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "llama"),
        *("mistral", "mixtral", "olmo", "phi", "phi3", "qwen2", "qwen3", "stablelm"),
    )
)
"""Model families whose packed documents get the same logits as alone, with eager attention and sdpa and
without a KV cache: transformers 5.23, tests/data/test_packing.py."""
MIXED = frozenset(("bert", "biogpt", "bloom", "falcon", "mamba", "mpt", "opt", "xlnet"))
"""Model families whose packed documents attend to each other: they create their own attention mask, don't
pass positions to the common one, or use none (the same test)."""
_LOGIT_TOLERANCE = 1e-4
_HALF_LOGIT_TOLERANCE = 5e-2
"""ASSUMPTION: relative difference of logits due to rounding; attention across documents changes the logits of
trained models by some tenths."""


def pack_lengths(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return the documents of each row by best-fit decreasing: longest first, each into the fullest row.

    It needs at most 11/9 of the optimal number of rows, plus four (Johnson, 1973); for token sequences see
    https://arxiv.org/abs/2107.02027 and https://arxiv.org/abs/2404.10830.

    Args:
        lengths: tokens of each document, none above row_length.
        row_length: tokens per row.
    """
    rows: list[list[int]] = []
    spaces: list[int] = []
    rows_with: dict[int, list[int]] = {}
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(spaces, lengths[document])
        if place == len(spaces):
            row, space = len(rows), row_length
            rows.append([])
        else:
            space = spaces[place]
            row = rows_with[space].pop()
            if not rows_with[space]:
                del spaces[place], rows_with[space]
        rows[row].append(document)
        left = space - lengths[document]
        if left and left not in rows_with:
            insort(spaces, left)
        if left:
            rows_with.setdefault(left, []).append(row)
    return rows


def pack_documents(
    examples: Mapping[str, Sequence[Sequence[int]]], *, row_length: int, pad_token_id: int | None
) -> dict[str, list[list[int]]]:
    """Pack a batch of documents into rows: for ``dataset.map(..., batched=True, remove_columns=...)``.

    Each batch is packed separately, so a larger ``batch_size`` of map leaves less padding. A document longer
    than a row is split. The padding at a row's end is a document of its own, without labels.

    Args:
        examples: a batch of a dataset, by column: `input_ids`, and `labels` if they differ. Tokens with an
            `attention_mask` of 0 are padding, and dropped.
        row_length: tokens of every row, at least two.
        pad_token_id: fills a row's end.

    Returns:
        `input_ids`, `position_ids` that restart at 0 with each document, and `labels` that are -100 on the
        first token of each, so that no document predicts the start of the next. There is no
        `attention_mask`: with one, transformers ignores positions.

    Raises:
        UserError: there is no padding token.
    """
    if pad_token_id is None:
        raise UserError(
            "padding-token-missing",
            "there is no token to fill rows with",
            found="pad_token_id=None",
            why="all rows have the same length, and documents rarely fill them completely",
            fix="use pad_token_id=tokenizer.eos_token_id: the end of a row has no labels",
        )
    names = [name for name in ("input_ids", "labels", "attention_mask") if name in examples]
    columns = zip(*(examples[name] for name in names), strict=True)
    rows = (dict(zip(names, values, strict=True)) for values in columns)
    documents = [
        (tokens[begin : begin + row_length], labels[begin : begin + row_length])
        for tokens, labels in map(without_padding, rows)
        for begin in range(0, len(tokens), row_length)
    ]
    packed: dict[str, list[list[int]]] = {"input_ids": [], "position_ids": [], "labels": []}
    for row in pack_lengths([len(tokens) for tokens, _ in documents], row_length):
        ids: list[int] = []
        positions: list[int] = []
        targets: list[int] = []
        for tokens, labels in (documents[index] for index in row):
            ids += tokens
            positions += range(len(tokens))
            targets += [IGNORED, *labels[1:]]
        left = row_length - len(ids)
        packed["input_ids"].append(ids + [pad_token_id] * left)
        packed["position_ids"].append([*positions, *range(left)])
        packed["labels"].append(targets + [IGNORED] * left)
    return packed


def without_padding(row: Mapping[str, Sequence[int]]) -> tuple[Sequence[int], Sequence[int]]:
    """Return a row's tokens and labels without padding; the labels default to the tokens."""
    tokens, mask = row["input_ids"], row.get("attention_mask")
    labels = row.get("labels", tokens)
    if mask is None or all(mask):
        return tokens, labels
    return list(itertools.compress(tokens, mask)), list(itertools.compress(labels, mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Collates rows of `pack_documents` into batches."""

    flat: bool = False
    """True to make one long row of shape (1, rows * row_length): flash attention uses positions only for a
    single row (transformers/modeling_flash_attention_utils.py, _is_packed_sequence)."""

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return input_ids, position_ids and labels of a batch."""
        from transformers import default_data_collator

        batch = default_data_collator(list(features))
        return {name: rows.reshape(1, -1) for name, rows in batch.items()} if self.flat else batch


def keep_documents_apart(model: Any) -> tuple[str, ...]:
    """Ensure that documents in one row don't attend to each other, tested by a forward pass of a few tokens.

    transformers separates documents by their positions only without a KV cache, which a model in a custom
    loop creates unless its configuration says otherwise: it is switched off, as Trainer does.

    Args:
        model: a causal language model of transformers, before it is wrapped for training.

    Returns:
        What was changed or could not be tested, in words for the user.

    Raises:
        UserError: documents attend to each other in this model.
    """
    notes = []
    for config in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
        if getattr(config, "use_cache", False):
            config.use_cache = False
            notes.append("the model's cache is switched off: with it, packed documents attend to each other")
    family = model.config.model_type
    if family in MIXED:
        raise _mixing_error(model, "measured for its family")
    if family in APART and attention_of(model.config) in ("eager", "sdpa"):
        return tuple(notes)
    if any(not parameter.numel() or parameter.is_meta for parameter in model.parameters()):
        return (*notes, f"packing with {family} is untested: its weights are not available for a test")
    if not _has_same_logits_alone(model):
        raise _mixing_error(model, "tested with two documents of a few tokens")
    return tuple(notes)


def _has_same_logits_alone(model: Any) -> bool:
    """Return True if a document's logits after another document equal those it has alone."""
    import torch

    device = next(model.parameters()).device
    size = model.get_input_embeddings().num_embeddings
    first, second = (torch.arange(length, device=device) * 7 % size for length in (6, 5))
    ids, positions = torch.cat([first, second + 1]), torch.cat([torch.arange(6), torch.arange(5)])
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            packed = model(input_ids=ids[None], position_ids=positions[None].to(device)).logits[0, 6:].float()
            alone = model(input_ids=ids[None, 6:]).logits[0]
    finally:
        model.train(was_training)
    allowed = _LOGIT_TOLERANCE if alone.dtype is torch.float32 else _HALF_LOGIT_TOLERANCE
    return bool((packed - alone.float()).abs().max() <= allowed * alone.float().abs().max())


def _mixing_error(model: Any, how: str) -> UserError:
    return UserError(
        "packing-mixes-documents",
        f"packed documents attend to each other in {type(model).__name__}",
        found=f"{model.config.model_type} with {attention_of(model.config)} attention, {how}",
        why="its attention ignores that positions restart",
        fix="do not pack: pad each batch, with samples of similar length (--group-by-length)",
        see="https://huggingface.co/blog/packing-with-FA2",
    )
