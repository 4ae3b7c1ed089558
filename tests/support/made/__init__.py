"""Tiny models, tokenizers and datasets, made on the spot from a seed: nothing is downloaded."""
