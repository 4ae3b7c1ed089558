"""Text of JSON, HJSON and YAML files to documents with a place for everything, and edits back to text."""

from zerofit.configs.read import decode, read_document, repeated_keys, why_not_json
from zerofit.configs.text.apply_edits import apply_edits
from zerofit.configs.text.spelling import Uneditable
from zerofit.configs.text.unreadable import MAX_BYTES
from zerofit.core.errors import Unreadable

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
