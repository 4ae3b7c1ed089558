"""The columns of a dataset whose lengths are counted: named by the user, or recognized as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IDS = "input_ids"
MASK = "attention_mask"
"""transformers' names of a sample's tokens and of its attention mask."""
_PAIR_COLUMNS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"))
"""Text columns of GLUE's tasks with two texts. https://huggingface.co/datasets/nyu-mll/glue"""
_TEXT_COLUMNS = ("text", "content", "sentence", "document", "article", "review", "body")
"""Common names of a text column. ASSUMPTION."""
_NUMBER = re.compile(r"\s*[-+]?[\d.,]+(e[-+]?\d+)?\s*", re.IGNORECASE)
_CHAT_COLUMNS = ("messages", "conversations", "conversation", "chat")
"""Common names of a chat column. ASSUMPTION."""
_OWN_COLUMN = "write the model's input text into a column of its own"
_CHAT_FIX = f"{_OWN_COLUMN}: tokenizer.apply_chat_template(messages, tokenize=False)"
_MAX_SHOWN = 12


class ColumnKind(Enum):
    """Kind of a column's values."""

    TEXT = "text"
    WORDS = "lists of words"
    IDS = "lists of numbers"
    NUMBERS = "numbers"
    OTHER = "nested values"
    NOTHING = "nothing in its first rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedColumns:
    """The columns of a dataset to count."""

    names: tuple[str, ...]
    """One, or two that are tokenized as a pair; a column of ids is followed by its mask, if any."""
    is_tokenized: bool = False
    """True if they contain token ids, not text."""


def chosen_columns(head: Mapping[str, Sequence[Any]], *, named: tuple[str, ...], file: str) -> CountedColumns:
    """Return the columns to count.

    Args:
        head: some values of each column.
        named: the user's columns; empty to guess.
        file: the first file's name.

    Raises:
        UserError: a column does not exist or contains no text, or the column can't be guessed.
    """
    found = {name: _column_kind(values) for name, values in head.items()}
    if named:
        return _named(found, named, file)
    if found.get(IDS) is ColumnKind.IDS:
        return _ids(found, IDS)
    texts = [name for name, kind in found.items() if kind is ColumnKind.TEXT]
    words = [name for name, kind in found.items() if kind is ColumnKind.WORDS]
    if pair := next((pair for pair in _PAIR_COLUMNS if set(pair) <= set(texts)), None):
        return CountedColumns(names=pair)
    can_be_text = (ColumnKind.TEXT, ColumnKind.NUMBERS)
    if known := next((name for name in _TEXT_COLUMNS if found.get(name) in can_be_text), None):
        return CountedColumns(names=(known,))
    candidates = texts or words
    if not candidates and len(found) == 1 and ColumnKind.NOTHING in found.values():
        candidates = list(found)  # such as a text file that starts with empty lines
    if len(candidates) == 1:
        return CountedColumns(names=(candidates[0],))
    if candidates:
        raise UserError(
            "text-column-unclear",
            "several columns hold text",
            found=f"{file}: {', '.join((texts + words)[:_MAX_SHOWN])}",
            why="the lengths depend on which of them the model gets",
            fix=f"name it: --text {candidates[0]}; two, separated by a comma, are tokenized as a pair",
        )
    shown = [f"{name} ({kind.value})" for name, kind in list(found.items())[:_MAX_SHOWN]]
    raise UserError(
        "text-column-missing",
        "no column holds text",
        found=f"{file}: {', '.join(shown)}",
        why=f"only lengths of text, lists of words, or {IDS}",
        fix=_CHAT_FIX
        if any(name in _CHAT_COLUMNS for name in found)
        else "name another file, or with --text a column whose first rows are empty",
    )


def _named(found: Mapping[str, ColumnKind], named: tuple[str, ...], file: str) -> CountedColumns:
    for name in named:
        if name not in found:
            near = nearest(name, found)
            raise UserError(
                "column-unknown",
                "the dataset has no such column",
                found=f"--text {','.join(named)} with {file}",
                why=f"its columns are {', '.join(list(found)[:_MAX_SHOWN])}",
                fix=f"did you mean --text {near}?" if near else "name one of them",
            )
        is_half_ids = found[name] is ColumnKind.IDS and len(named) > 1
        if found[name] is ColumnKind.OTHER or is_half_ids:
            raise UserError(
                "column-no-text",
                "the column holds no text",
                found=f"--text {name} with {file}",
                why=f"it holds {found[name].value}; only lengths of text, lists of words, or ids",
                fix=_CHAT_FIX if name in _CHAT_COLUMNS else f"--text {name}" if is_half_ids else _OWN_COLUMN,
            )
    if found[named[0]] is ColumnKind.IDS:
        return _ids(found, named[0])
    return CountedColumns(names=named)


def _ids(found: Mapping[str, ColumnKind], name: str) -> CountedColumns:
    has_mask = name == IDS and found.get(MASK) is ColumnKind.IDS
    return CountedColumns(names=(IDS, MASK) if has_mask else (name,), is_tokenized=True)


def _column_kind(values: Sequence[Any]) -> ColumnKind:
    """Return a column's kind, judged by some of its values: the first kind of the enum that occurs."""
    kinds = {_value_kind(value) for value in values if value is not None and value != [] and value != ""}
    return next((kind for kind in ColumnKind if kind in kinds), ColumnKind.NOTHING)


def _value_kind(value: Any) -> ColumnKind:
    if isinstance(value, str):
        return ColumnKind.NUMBERS if _NUMBER.fullmatch(value) else ColumnKind.TEXT
    if isinstance(value, bool | int | float):
        return ColumnKind.NUMBERS
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return ColumnKind.WORDS
        if all(isinstance(item, int) for item in value):
            return ColumnKind.IDS
    return ColumnKind.OTHER
