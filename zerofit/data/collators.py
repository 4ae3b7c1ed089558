"""The collator that fits a task: transformers' own, with padding, ours where it has none that is right."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest
from zerofit.data.labels import IGNORED
from zerofit.data.masks import MASKED_SHARE, SeededMasks
from zerofit.data.packing import PackedRows, is_flash, keep_documents_apart, without_padding
from zerofit.data.padding import FixedRows, Padding, PadTo
from zerofit.data.whole_words import WholeWordCollator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Task(StrEnum):
    """What a model learns from a batch."""

    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    MULTIPLE_CHOICE = "multiple-choice"
    MASKED_LM = "masked-lm"
    WHOLE_WORD_MASKED_LM = "whole-word-masked-lm"
    """Rows come from `add_word_ids`."""
    CAUSAL_LM = "causal-lm"
    PACKED_CAUSAL_LM = "packed-causal-lm"
    """Rows come from `pack_documents`."""
    SEQ2SEQ = "seq2seq"


_NEEDS_MASK = (Task.MASKED_LM, Task.WHOLE_WORD_MASKED_LM)


def collator_for(
    task: Task | str,
    tokenizer: Any,
    *,
    padding: Padding | None = None,
    model: Any = None,
    mlm_probability: float = MASKED_SHARE,
    seed: int | None = None,
) -> Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]:
    """Return what makes a batch of rows, for a DataLoader's ``collate_fn`` or a Trainer's ``data_collator``.

    Args:
        task: what the model learns.
        tokenizer: a tokenizer of transformers.
        padding: dynamic by default; packed rows are full already and ignore it.
        model: seq2seq models make their decoder's inputs from labels; packed documents, and those without
            padding, are tried with it. Others need none.
        mlm_probability: share of tokens that masked language modelling asks for.
        seed: of the masks; None takes torch's global generator.

    Raises:
        UserError: there is no such task, or the tokenizer, the model or the padding does not fit it.
    """
    import transformers

    task = _task(task)
    padding = padding or Padding()
    _check(task, tokenizer, padding, model)
    arguments = padding.arguments()
    match task:
        case Task.SEQUENCE_CLASSIFICATION:
            collator: Any = transformers.DataCollatorWithPadding(tokenizer, **arguments)
        case Task.TOKEN_CLASSIFICATION:
            collator = transformers.DataCollatorForTokenClassification(tokenizer, **arguments)
        case Task.MULTIPLE_CHOICE:
            collator = transformers.DataCollatorForMultipleChoice(tokenizer, **arguments)
        case Task.SEQ2SEQ:
            collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model, **arguments)
        case Task.MASKED_LM:
            # It knows no fixed length; its multiple is the same for rows that are not longer, see FixedRows.
            collator = transformers.DataCollatorForLanguageModeling(
                tokenizer,
                mlm_probability=mlm_probability,
                pad_to_multiple_of=padding.max_length or padding.multiple_of,
            )
            if seed is not None:
                collator = SeededMasks(masks=collator, seed=seed)
        case Task.WHOLE_WORD_MASKED_LM:
            collator = WholeWordCollator(
                tokenizer=tokenizer, padding=padding, mlm_probability=mlm_probability, seed=seed
            )
        case Task.PACKED_CAUSAL_LM:
            _keep_apart(model)
            collator = PackedRows(flat=is_flash(model))
        case Task.CAUSAL_LM if padding.to is PadTo.NOTHING:
            _keep_apart(model)
            collator = FlatDocuments(flattens=transformers.DataCollatorWithFlattening())
        case Task.CAUSAL_LM:
            collator = CausalCollator(
                pads=transformers.DataCollatorForTokenClassification(tokenizer, **arguments)
            )
    if padding.max_length is not None and task is not Task.PACKED_CAUSAL_LM:
        collator = FixedRows(makes=collator, max_length=padding.max_length)
    return collator  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalCollator:
    """Makes batches for causal language modelling: labels are the tokens, or the rows' own, padded by -100.

    Rows that are padded already, as their attention_mask says, have no labels on that padding either.

    transformers' DataCollatorForLanguageModeling(mlm=False) also ignores every token that is spelt like the
    padding: with ``pad_token = eos_token`` a model never learns to end. And it overwrites the rows' labels.
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
    """Makes one row of a batch's documents, the padding that their attention_mask names left out."""

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
    """Return a row's tokens as labels, -100 on what its mask leaves out."""
    tokens: Sequence[int] = row["input_ids"]
    mask = row.get("attention_mask")
    if mask is None or all(mask):
        return tokens
    return [int(token) if kept else IGNORED for token, kept in zip(tokens, mask, strict=True)]


def _keep_apart(model: Any) -> None:
    for note in keep_documents_apart(model):
        warnings.warn(note, stacklevel=3)


def _task(task: str) -> Task:
    try:
        return Task(task)
    except ValueError:
        near = nearest(task, [one.value for one in Task])
        raise UserError(
            "unknown-task",
            f"there is no collator for {task}",
            found=f"task={task!r}",
            why="a collator knows what becomes of labels, and each task has its own",
            fix=f"take {near}" if near else f"take one of {', '.join(Task)}",
        ) from None


def _check(task: Task, tokenizer: Any, padding: Padding, model: Any) -> None:
    is_packed = task is Task.PACKED_CAUSAL_LM
    if padding.to is PadTo.NOTHING and task is not Task.CAUSAL_LM:
        raise UserError(
            "task-needs-padding",
            f"rows of {task} must be padded",
            found="no_padding()",
            why="documents in one row are kept apart in causal language models only",
            fix="take dynamic_padding(), and batches of like length (--group-by-length) for less of it",
        )
    if (is_packed or padding.to is PadTo.NOTHING) and model is None:
        raise UserError(
            "packing-needs-model",
            "documents share rows, and there is no model to try it with",
            found=f"collator_for({task.value!r}, ...) without model",
            why="some models let packed documents see each other, all of them while they keep a cache",
            fix="pass model=",
        )
    if not is_packed and padding.to is not PadTo.NOTHING and tokenizer.pad_token_id is None:
        raise UserError(
            "tokenizer-without-padding",
            "the tokenizer has no token to pad with",
            found=f"{type(tokenizer).__name__} with pad_token None",
            why="rows of a batch have the same length",
            fix="tokenizer.pad_token = tokenizer.eos_token: attention and loss leave padding out",
        )
    if task in _NEEDS_MASK and tokenizer.mask_token is None:
        raise UserError(
            "tokenizer-without-mask",
            "the tokenizer has no mask token",
            found=f"{type(tokenizer).__name__} for {task}",
            why="masked language modelling replaces tokens by it",
            fix=f"take {Task.CAUSAL_LM.value}, or a tokenizer of a masked language model",
        )
