"""The number of items that a loss is averaged over, read from its autograd graph.

The mean over a batch's labels does not show their number, and models and scripts compute it in many ways; but
the backward pass needs the number, so the graph contains it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_NONE, _MEAN = 0, 1
"""Reductions of torch's losses: one number per item, or their mean (ATen/core/Reduction.h)."""
_BY_LABEL = ("NllLoss",)
_BY_ELEMENT = ("MseLoss", "BinaryCrossEntropy", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss")
_KEEPS_THE_MEAN = (
    "Div",
    "Mul",
    "Neg",
    "ToCopy",
    "Clone",
    "Alias",
    "View",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "PreBackwardFunctionForModule",  # DeepSpeed's, around the outputs of each module at stage 3
)
_SUMS = ("Add", "Sub")
_DATA_PARALLEL = "_DDPSink"
"""DistributedDataParallel's, around all outputs if it looks for unused parameters."""
_BY_ENTRY = frozenset(
    (
        *_KEEPS_THE_MEAN,
        *_SUMS,
        "Abs",
        "Pow",
        "Sqrt",
        "Rsqrt",
        "Exp",
        "Expm1",
        "Log",
        "Log1p",
        "Log2",
        "Sin",
        "Cos",
        "Sgn",
        "Relu",
        "LeakyRelu",
        "Elu",
        "Gelu",
        "Silu",
        "Tanh",
        "Sigmoid",
        "LogSigmoid",
        "Softplus",
        "Clamp",
        "ClampMin",
        "ClampMax",
        "Minimum",
        "Maximum",
        "Where",
        "MaskedFill",
        "NativeDropout",
        "Index",
        "MaskedSelect",
        "Slice",
        "UnsafeView",
        "Expand",
        "Xlogy",
        "Addcmul",
        "Lerp",
        "Stack",
        "Cat",
        "Split",
    )
)
"""Elementwise operators, which keep a batch's values separate."""
_OF_A_ROW = frozenset(
    ("Mean", "Sum", "Logsumexp", "Amax", "Amin", "Max", "Min", "LinalgVectorNorm", "Norm", "Std", "Var")
)
"""Reductions, which keep samples separate unless the first dimension is reduced."""
_MOVES = frozenset(("Permute", "Transpose", "T"))
_WHOLE_ROWS = frozenset(
    (
        "",  # AccumulateGrad: a parameter
        _DATA_PARALLEL,
        "Addmm",
        "Mm",
        "Bmm",
        "Baddbmm",
        "Linear",
        "MkldnnLinear",
        "Convolution",
        "Embedding",
        "Gather",
        "NativeLayerNorm",
        "FusedRmsNorm",
        "LogSoftmax",
        "Softmax",
    )
)
"""Operators by which a model computes its outputs, one or more rows per sample."""


def items_of(loss: Any) -> Any:
    """Return the number of items that a loss is averaged over.

    Returns:
        A scalar fp32 tensor on the loss's device: labels without ignored ones, elements, or the sum of their
        classes' weights. None if the graph does not tell.
    """
    import torch

    items = _common(loss.grad_fn, loss.output_nr)
    return None if items is None else torch.as_tensor(items, dtype=torch.float32, device=loss.device)


def _common(node: Any, place: int) -> Any:
    """Return the number of items of each term of a loss; None if they differ or one is unknown."""
    found = [_items(term) for term in _terms(node, place)]
    if not found or any(items is None for items in found):
        return None
    return found[0] if all(float(items) == float(found[0]) for items in found) else None


def _terms(node: Any, place: int) -> Iterator[Any]:
    """Yield the nodes whose sum is a loss, up to factors; constants are left out."""
    waiting = [(node, place)]
    while waiting:
        node, place = waiting.pop()
        if node is None:
            continue
        kind, following = _kind(node), node.next_functions
        held = _held(node)
        if kind == _DATA_PARALLEL and place < len(following):
            waiting.append(following[place])
        elif kind in _SUMS or (len(held) == 1 and (kind in _KEEPS_THE_MEAN or _is_mean_of_one(node))):
            waiting += held
        else:
            yield node


def _items(node: Any) -> Any:
    kind = _kind(node)
    if kind == "Mean":
        return _items_of_mean(node)
    if getattr(node, "_saved_reduction", None) != _MEAN:
        return None
    if kind.startswith(_BY_LABEL):
        if node._saved_weight is not None:
            return node._saved_total_weight
        # Not the total weight, which is rounded if the logits have 16 bits.
        return (node._saved_target != _signed(node._saved_ignore_index)).sum()
    if kind.startswith(_BY_ELEMENT):
        return node._saved_self.numel()
    return None


def _is_mean_of_one(node: Any) -> bool:
    """Return True if a node takes the mean of a scalar: loss.mean()."""
    return _kind(node) == "Mean" and not node._saved_self_sym_sizes


def _items_of_mean(node: Any) -> Any:
    """Return the number of items of a mean over everything below it; None if they are not a batch's."""
    count = node._saved_self_sym_numel
    ((below, _),) = node.next_functions
    if below is None:
        return None
    while _kind(below) in _KEEPS_THE_MEAN and len(held := _held(below)) == 1:
        ((below, _),) = held
    kind = _kind(below)
    if kind in ("Stack", "Cat") and count == len(below.next_functions):  # several losses, one number each
        each = [_common(input_node, at) for input_node, at in below.next_functions]
        if all(items is not None for items in each):
            return each[0] if all(float(items) == float(each[0]) for items in each) else None
    if count == 1 and getattr(below, "_saved_reduction", None) == _MEAN:  # loss[None].mean()
        return _items(below)
    if kind == "Mean" and _reduces_the_batch(below):  # equal to one mean over both
        ((inner, _),) = below.next_functions
        return below._saved_self_sym_numel if _has_rows(inner, may_move=True) else None
    return count if _has_rows(below, may_move=True) else None


def _has_rows(node: Any, *, may_move: bool) -> bool:
    """Return True if the number of values is a multiple of the batch size."""
    waiting, seen = [(node, may_move)], set()
    while waiting:
        node, may_move = waiting.pop()
        if node is None or (node, may_move) in seen:
            continue
        seen.add((node, may_move))
        kind = _kind(node)
        if kind in _WHOLE_ROWS or getattr(node, "_saved_reduction", None) == _NONE:
            continue
        if kind in _OF_A_ROW:
            if _reduces_the_batch(node):
                return False
            may_move = False
        elif kind == "Select":
            if node._saved_dim == 0:
                return False
        elif not (kind in _BY_ENTRY or (kind in _MOVES and may_move)):
            return False
        waiting += [(held, may_move) for held, _ in _held(node)]
    return True


def _reduces_the_batch(node: Any) -> bool:
    """Return True if a node reduces the first dimension, or does not tell."""
    dims = getattr(node, "_saved_dim", None)
    if dims is None:
        return True
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    num_dims = None if sizes is None else len(sizes)
    found = [_signed(dim) for dim in (dims if isinstance(dims, tuple) else (dims,))]
    # Where sizes are not saved, only the last of several dimensions certainly differs from the first.
    return not found or any(dim == 0 or (num_dims is not None and dim + num_dims == 0) for dim in found)


def _held(node: Any) -> list[tuple[Any, int]]:
    """Return the inputs of a node, without constants."""
    return [(input_node, at) for input_node, at in node.next_functions if input_node is not None]


def _kind(node: Any) -> str:
    """Return the operator of a node: "NllLoss" of "NllLossBackward0"."""
    return str(node.name().rpartition("::")[2].rpartition("Backward")[0])


def _signed(number: int) -> int:
    """Return a number that autograd shows as unsigned."""
    return number - 2**64 if number >= 2**63 else number
