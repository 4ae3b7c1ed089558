"""What data costs and how to batch it: samplers, collators, labels, packing, loading, reports of lengths."""

from typing import Any

_HOMES = {
    "LengthGroupedBatches": "sampler",
    "LoadingFacts": "loading",
    "LongestFirst": "ordered",
    "PackedRows": "packing",
    "Padding": "padding",
    "Pieces": "labels",
    "Task": "collators",
    "WholeWordCollator": "whole_words",
    "add_word_ids": "whole_words",
    "align_labels": "labels",
    "choose_loading": "loading",
    "collator_for": "collators",
    "dynamic_padding": "padding",
    "fast_tokenizer": "tokenizers",
    "fixed_padding": "padding",
    "keep_documents_apart": "packing",
    "measure_loading": "loading",
    "measure_tokenizer": "tokenizers",
    "no_padding": "padding",
    "pack_documents": "packing",
    "pack_lengths": "packing",
    "sample_lengths": "known_lengths",
    "tensor_core_multiple": "padding",
    "tokenize_and_align": "labels",
    "warn_if_slow": "tokenizers",
}
"""The public names, by module of zerofit.data: imported when they are asked for, as that takes time."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
