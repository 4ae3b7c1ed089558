"""Length report: the distribution of a dataset's sample lengths, and its cost in padding."""

from zerofit.data.lengths.histogram import LengthHistogram

__all__ = ["LengthHistogram"]
