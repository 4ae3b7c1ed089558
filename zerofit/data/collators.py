"""Collators by task: transformers' own, or ours where it has none that is correct."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest
from zerofit.core.upstream.transformers import attention_of
from zerofit.data.labels import IGNORED
from zerofit.data.masking import MASKED_SHARE, SeededMasks, WholeWordCollator
from zerofit.data.packing import PackedRows, keep_documents_apart, without_padding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Collator = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]

_UNCHANGED = {
    "sequence-classification": "DataCollatorWithPadding",
    "token-classification": "DataCollatorForTokenClassification",
    "multiple-choice": "DataCollatorForMultipleChoice",
}
"""transformers' collators used unchanged."""
_PACKED_TASKS = ("flat-causal-lm", "packed-causal-lm")
COLLATOR_TASKS = (
    *_UNCHANGED,
    "seq2seq",
    "masked-lm",
    "whole-word-masked-lm",
    "causal-lm",
    *_PACKED_TASKS,
)
"""Training objectives. Rows must come from `add_word_ids` for whole-word-masked-lm, and from `pack_documents`
for packed-causal-lm; flat-causal-lm concatenates a batch's documents into one row."""


def collator_for(
    task: str,
    tokenizer: Any,
    *,
    pad_to_multiple_of: int | None = None,
    model: Any = None,
    mlm_probability: float = MASKED_SHARE,
    seed: int | None = None,
) -> Collator:
    """Return the collator of a task, for DataLoader's ``collate_fn`` or Trainer's ``data_collator``.

    Args:
        task: one of COLLATOR_TASKS.
        tokenizer: a tokenizer of transformers.
        pad_to_multiple_of: batches are padded to their longest row, rounded up to this; ignored for
            concatenated and packed documents, which have no padding.
        model: seq2seq models compute their decoder's inputs from labels; models for concatenated documents
            are tested for attention across documents. Other tasks need none.
        mlm_probability: share of tokens that are masked.
        seed: of the masks; None uses torch's global generator.

    Raises:
        UserError: unknown task, or documents attend to each other in the model.
    """
    import transformers

    _check(task, model)
    multiple = {"pad_to_multiple_of": pad_to_multiple_of}
    collator: Any
    match task:
        case "seq2seq":
            collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model, **multiple)
        case "masked-lm":
            collator = transformers.DataCollatorForLanguageModeling(
                tokenizer, mlm_probability=mlm_probability, **multiple
            )
            if seed is not None:
                collator = SeededMasks(masks=collator, seed=seed)
        case "whole-word-masked-lm":
            collator = WholeWordCollator(
                tokenizer=tokenizer, mlm_probability=mlm_probability, seed=seed, **multiple
            )
        case "causal-lm":
            collator = CausalCollator(
                pads=transformers.DataCollatorForTokenClassification(tokenizer, **multiple)
            )
        case "flat-causal-lm" | "packed-causal-lm":
            for note in keep_documents_apart(model):
                warnings.warn(note, stacklevel=2)
            collator = PackedRows(flat="flash" in attention_of(model.config))
            if task == "flat-causal-lm":
                collator = FlatDocuments(flattens=transformers.DataCollatorWithFlattening())
        case _:
            collator = getattr(transformers, _UNCHANGED[task])(tokenizer, **multiple)
    return collator  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalCollator:
    """Collates batches for causal language modelling; labels are the tokens, or the rows' own labels.

    Rows that are already padded, according to their attention_mask, get no labels on that padding either.

    transformers' DataCollatorForLanguageModeling(mlm=False) also ignores every token equal to the padding
    token: with ``pad_token = eos_token`` a model never learns to end. It also overwrites the rows' labels.
    """

    pads: Any
    """transformers' DataCollatorForTokenClassification."""

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return input_ids, attention_mask and labels of a batch, each of shape (rows, tokens)."""
        rows = [row if "labels" in row else {**row, "labels": _own_labels(row)} for row in features]
        batch: Mapping[str, Any] = self.pads(rows)
        return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatDocuments:
    """Concatenates a batch's documents into one row, without padding according to their attention_mask."""

    flattens: Any
    """transformers' DataCollatorWithFlattening."""

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return input_ids, position_ids and labels of a batch, each of shape (1, tokens)."""
        documents = (without_padding(row) for row in features)
        batch: Mapping[str, Any] = self.flattens(
            [{"input_ids": tokens, "labels": labels} for tokens, labels in documents]
        )
        return batch


def _own_labels(row: Mapping[str, Any]) -> Sequence[int]:
    """Return a row's tokens as labels, -100 where its mask is 0."""
    tokens: Sequence[int] = row["input_ids"]
    mask = row.get("attention_mask")
    if mask is None or all(mask):
        return tokens
    return [int(token) if kept else IGNORED for token, kept in zip(tokens, mask, strict=True)]


def _check(task: str, model: Any) -> None:
    """Check that a task exists and that its model is given if needed."""
    if task not in COLLATOR_TASKS:
        near = nearest(task, COLLATOR_TASKS)
        raise UserError(
            "unknown-task",
            f"there is no collator for {task}",
            found=f"task={task!r}",
            why="each task has its own collator, which makes the labels",
            fix=f"take {near}" if near else f"use one of {', '.join(COLLATOR_TASKS)}",
        )
    if task in _PACKED_TASKS and model is None:
        raise UserError(
            "packing-needs-model",
            "documents share rows, and there is no model to test",
            found=f"collator_for({task!r}, ...) without model",
            why="packed documents attend to each other in some models, and in all of them with a cache",
            fix="pass model=",
        )
