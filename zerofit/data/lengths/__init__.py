"""Lengths: how many samples of a dataset have how many tokens, and what follows from it for its batches."""

from zerofit.data.lengths.histogram import LengthHistogram

__all__ = ["LengthHistogram"]
