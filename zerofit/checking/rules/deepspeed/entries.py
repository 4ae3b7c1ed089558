"""How rules about ds_config.json come by its entries and their schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.situation import known
from zerofit.configs.schema import walk_document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document
    from zerofit.configs.schema import FoundKey, Schema


def schema_of(situation: Situation) -> Schema:
    """Return the schema of ds_config.json.

    Raises:
        Lacking: nobody gave it.
    """
    return known(situation.schemas, "which keys DeepSpeed has").deepspeed


def entries_of(situation: Situation) -> Iterator[tuple[Document, FoundKey]]:
    """Yield the document and each of its entries; nothing without a document.

    Raises:
        Lacking: there is a document, and nobody gave the schema.
    """
    if situation.deepspeed is not None:
        for found in walk_document(situation.deepspeed, schema_of(situation)):
            yield situation.deepspeed, found
