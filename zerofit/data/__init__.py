"""Length-grouped batches, labels, whole-word masks, loading, and length reports."""

from typing import Any

_HOMES = {
    "LengthGroupedBatches": "sampler",
    "LongestFirst": "sampler",
    "Pieces": "labels",
    "WholeWordCollator": "masking",
    "add_word_ids": "masking",
    "align_labels": "labels",
    "choose_loading": "loading",
    "measure_files": "length_counts",
    "measure_loading": "loading",
    "pack_lengths": "lengths.padding",
    "sample_lengths": "known_lengths",
    "tokenize_and_align": "labels",
}
"""Public names by module of zerofit.data, imported on first access since imports take time."""

_PACKING = "transformers' DataCollatorWithFlattening, or SFTConfig(packing=True) of TRL: docs/collators.md"
_REMOVED = {
    "PackedRows": _PACKING,
    "collator_for": "the collator of your task, which transformers or zerofit.data has: docs/collators.md",
    "keep_documents_apart": _PACKING,
    "pack_documents": _PACKING,
}
"""Names that zerofit.data had, and what to use."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _REMOVED:
        raise ImportError(f"zerofit.data.{name} was removed: use {_REMOVED[name]}", name=__name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
