"""Which columns of a dataset are counted: those that the user names, or those that are plainly its text."""

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
"""What transformers' tokenizers call a sample's tokens, and the mask that is 0 where they are padding."""
_PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"))
"""Columns of GLUE's tasks on two texts. https://huggingface.co/datasets/nyu-mll/glue"""
_NAMES = ("text", "content", "sentence", "document", "article", "review", "body")
"""What datasets most often call their text. ASSUMPTION."""
_NUMBER = re.compile(r"\s*[-+]?[\d.,]+(e[-+]?\d+)?\s*", re.IGNORECASE)
_CHATS = ("messages", "conversations", "conversation", "chat")
"""What datasets most often call their chats. ASSUMPTION."""
_OWN_COLUMN = "write the text that the model is given into a column of its own"
_CHAT_FIX = f"{_OWN_COLUMN}: tokenizer.apply_chat_template(messages, tokenize=False)"
_MOST_SHOWN = 12
_LONGEST_NAME = 60
"""Characters. ASSUMPTION: a longer name of a column is a text."""


class Holds(Enum):
    """What a column holds."""

    TEXT = "text"
    WORDS = "lists of words"
    IDS = "lists of numbers"
    NUMBERS = "numbers"
    NOTHING = "nothing in its first rows"
    OTHER = "nested values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What of a dataset is counted."""

    names: tuple[str, ...]
    """One, or two that are tokenized as a pair; with the mask behind it for a column of ids that has one."""
    is_tokenized: bool = False
    """Whether they hold ids, not text."""


def holds(values: Sequence[Any]) -> Holds:
    """Return what a column holds, by some of its values."""
    kinds = {_kind(value) for value in values if value is not None and value != [] and value != ""}
    for kind in (Holds.TEXT, Holds.WORDS, Holds.IDS, Holds.NUMBERS, Holds.OTHER):
        if kind in kinds:
            return kind
    return Holds.NOTHING


def chosen_columns(head: Mapping[str, Sequence[Any]], *, named: tuple[str, ...], file: str) -> Columns:
    """Return what is counted.

    Args:
        head: some values of each column.
        named: what the user named; none to guess.
        file: the first file's name.

    Raises:
        UserError: a column is not there, holds no text, or nothing shows which one is meant.
    """
    found = {name: holds(values) for name, values in head.items()}
    if named:
        return _named(found, named, file)
    if found.get(IDS) is Holds.IDS:
        return Columns(names=(IDS, MASK) if found.get(MASK) is Holds.IDS else (IDS,), is_tokenized=True)
    texts = [name for name, held in found.items() if held is Holds.TEXT]
    pair = next((pair for pair in _PAIRS if set(pair) <= set(texts)), None)
    if pair is not None:
        return Columns(names=pair)
    can_be_text = (Holds.TEXT, Holds.NUMBERS)
    known = next((name for name in _NAMES if found.get(name) in can_be_text), None)
    words = [name for name, held in found.items() if held is Holds.WORDS]
    only = (texts if len(texts) == 1 else []) or (words if not texts and len(words) == 1 else [])
    if not only and len(found) == 1 and Holds.NOTHING in found.values():
        only = list(found)  # such as a text file that begins with empty lines
    if known is not None or only:
        return Columns(names=(known or only[0],))
    if texts or words:
        raise UserError(
            "text-column-unclear",
            "several columns hold text",
            found=f"{file}: {', '.join((texts + words)[:_MOST_SHOWN])}",
            why="which of them the model is given decides the lengths",
            fix=f"name it: --text {(texts + words)[0]}; two with a comma between are tokenized as a pair",
        )
    raise UserError(
        "text-column-missing",
        "no column holds text",
        found=f"{file}: {_listed(found)}",
        why=f"lengths are counted of text, of lists of words, or of {IDS}",
        fix=_CHAT_FIX
        if any(name in _CHATS for name in found)
        else "name another file, or with --text a column whose first rows are empty",
    )


def header_notes(names: Sequence[str], *, file: str) -> tuple[str, ...]:
    """Return what is odd in the names of a table's columns, one sentence each.

    Args:
        names: of a csv or tsv file, as its first line gives them.
        file: its name.
    """
    notes = []
    parted = next((mark for mark in (";", "|", ",", "\t") if len(names) == 1 and mark in names[0]), None)
    if parted is not None:
        notes.append(
            f"{file}: its only column is called {names[0]!r:.{_LONGEST_NAME}}: is {parted!r} between values?"
        )
    value = next((one for one in names if _NUMBER.fullmatch(one) or len(one) > _LONGEST_NAME), None)
    if parted is None and value is not None:
        shown = value if len(value) <= _LONGEST_NAME else value[:_LONGEST_NAME] + " ..."
        notes.append(f"{file}: its first line was taken for names of columns, {shown!r} among them")
    doubled = [name for name in names if f"{name}.1" in names]
    if doubled:
        notes.append(f"{file}: several columns are called {doubled[0]}; the first of them goes by that name")
    return tuple(notes)


def _named(found: Mapping[str, Holds], named: tuple[str, ...], file: str) -> Columns:
    for name in named:
        if name not in found:
            near = nearest(name, found)
            raise UserError(
                "column-unknown",
                "the dataset has no such column",
                found=f"--text {','.join(named)} with {file}",
                why=f"its columns are {', '.join(list(found)[:_MOST_SHOWN])}",
                fix=f"did you mean --text {near}?" if near else "name one of them",
            )
        if found[name] is Holds.OTHER:
            raise UserError(
                "column-no-text",
                "the column holds no text",
                found=f"--text {name} with {file}",
                why="it holds nested values; lengths are counted of text, of lists of words, or of ids",
                fix=_CHAT_FIX if name in _CHATS else _OWN_COLUMN,
            )
    if any(found[name] is Holds.IDS for name in named):
        if len(named) > 1:
            raise UserError(
                "column-no-text",
                "a pair is made of two columns of text",
                found=f"--text {','.join(named)} with {file}",
                why="one of them holds ids, which are tokenized already",
                fix=f"name that column alone: --text {next(n for n in named if found[n] is Holds.IDS)}",
            )
        has_mask = named == (IDS,) and found.get(MASK) is Holds.IDS
        return Columns(names=(IDS, MASK) if has_mask else named, is_tokenized=True)
    return Columns(names=named)


def _kind(value: Any) -> Holds:
    if isinstance(value, str):
        return Holds.NUMBERS if _NUMBER.fullmatch(value) else Holds.TEXT
    if isinstance(value, bool | int | float):
        return Holds.NUMBERS
    if isinstance(value, list):
        if all(isinstance(one, str) for one in value):
            return Holds.WORDS
        if all(isinstance(one, int) for one in value):
            return Holds.IDS
    return Holds.OTHER


def _listed(found: Mapping[str, Holds]) -> str:
    shown = [f"{name} ({held.value})" for name, held in list(found.items())[:_MOST_SHOWN]]
    return ", ".join(shown) or "no columns"
