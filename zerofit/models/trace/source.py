"""trace_model: the trace of a model, from the cache on disk where it lies there."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from zerofit.models.dimensions import check_sequence_length
from zerofit.models.trace.cache import key_of, read_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.models.source import ModelSource


def trace_model(
    source: ModelSource,
    request: TraceRequest,
    *,
    cache_folder: Path | None,
    on_progress: Callable[[str], None] | None = None,
) -> Trace:
    """Return what a model's micro-batch allocates and computes, as functions of its size.

    The model's own class runs forward and backward on tensors that have shapes and no values, with CUDA's
    kernels in the place of the CPU's. Mixtures of experts run as grouped matrix products, whose sizes do not
    depend on where the router sends a token. A trace in the cache is read without importing torch.

    Args:
        source: what probe_model returned.
        request: what decides the log.
        cache_folder: where traces are kept (see default_cache_folder); None keeps none.
        on_progress: told what is being run.

    Raises:
        UserError: the model can't be run on such tensors, or not with this request.
    """
    check_sequence_length(source.facts, request.sequence_length, request.target_length)
    path = None if cache_folder is None else cache_folder / f"{key_of(source, request)}.trace"
    trace = read_trace(path, request) if path else None
    if trace is None:
        trace = _trace(source, request, on_progress)
        if path:
            write_trace(path, trace)
    return trace


def _trace(source: ModelSource, request: TraceRequest, on_progress: Callable[[str], None] | None) -> Trace:
    import transformers

    from zerofit.models.meta_device import transformers_config
    from zerofit.models.source import LocatedConfig
    from zerofit.models.trace.entry import trace_config

    located = LocatedConfig(name=source.name, config=source.config, origin=source.origin, place=source.place)
    config = transformers_config(located, trust_remote_code=source.trust_remote_code)
    auto_class: Any = getattr(transformers, source.task.auto_class)
    build = partial(auto_class.from_config, trust_remote_code=source.trust_remote_code)
    return trace_config(config, build, request, on_progress=on_progress)
