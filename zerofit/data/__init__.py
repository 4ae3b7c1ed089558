"""Length-grouped batches, collators, labels, packing, loading, and length reports."""

from typing import Any

_HOMES = {
    "LengthGroupedBatches": "sampler",
    "LongestFirst": "sampler",
    "PackedRows": "packing",
    "Pieces": "labels",
    "WholeWordCollator": "masking",
    "add_word_ids": "masking",
    "align_labels": "labels",
    "choose_loading": "loading",
    "collator_for": "collators",
    "keep_documents_apart": "packing",
    "measure_files": "length_counts",
    "measure_loading": "loading",
    "pack_documents": "packing",
    "pack_lengths": "packing",
    "sample_lengths": "known_lengths",
    "tokenize_and_align": "labels",
}
"""Public names by module of zerofit.data, imported on first access since imports take time."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
