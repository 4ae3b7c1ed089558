"""The tracer: a model's forward and backward pass on fake tensors, as a log of allocations."""

from zerofit.models.trace.entry import trace_model

__all__ = ["trace_model"]
