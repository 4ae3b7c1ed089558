"""Sparse tensors without values: operators whose meta kernels lose the number of elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.torch import sparse_parts

if TYPE_CHECKING:
    from collections.abc import Callable


def is_sparse(tensor: Any) -> bool:
    """Return True if a tensor is sparse (COO), with indices and values instead of a storage."""
    import torch

    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo


def on_parts(function: Any, args: tuple[Any, ...], call: Callable[..., Any]) -> Any:
    """Return an operator's result on a sparse tensor, computed on its indices and values.

    Meta kernels return a tensor without elements (torch/_meta_registrations.py); CUDA's keep their number.

    Args:
        function: the operator.
        args: its arguments.
        call: runs and records an operator on the dense parts, given its arguments.

    Returns:
        None for an operator that works without this.
    """
    import torch

    name, aten = function.__name__, torch.ops.aten
    if name == "_coalesce.default":
        (tensor,) = args
        places, values = (call(aten.clone.default, (part,), {}) for part in sparse_parts(tensor))
        return _sparse(places, values, tensor.shape)
    if name == "sparse_mask.default":
        given, mask = args
        places, kept = sparse_parts(mask)
        values = call(aten.empty_like.default, (kept,), {"dtype": given.dtype})
        return _sparse(places, values, mask.shape)
    if name == "t.default" and is_sparse(args[0]):
        (tensor,) = args
        places, values = sparse_parts(tensor)
        return _sparse(call(aten.clone.default, (places,), {}), values, tensor.shape[::-1])
    return None


def _sparse(places: Any, values: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.sparse_coo_tensor(places, values, shape, is_coalesced=True, check_invariants=False)
