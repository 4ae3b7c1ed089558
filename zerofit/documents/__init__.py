"""Text of JSON, HJSON and YAML files to documents with a place for everything, and edits back to text."""

from zerofit.documents.apply import apply_edits
from zerofit.documents.limits import MAX_BYTES, Unreadable
from zerofit.documents.read import decode, read_document, repeated_keys, why_not_json
from zerofit.documents.spelling import Uneditable

__all__ = [
    "MAX_BYTES",
    "Uneditable",
    "Unreadable",
    "apply_edits",
    "decode",
    "read_document",
    "repeated_keys",
    "why_not_json",
]
