"""How many items a loss is the mean over, read from the graph that autograd made of it.

The mean over the labels of a batch tells nothing of their number, and models and scripts take it in many
ways; the backward pass has to know the number, so that autograd keeps what it follows from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEAN = 1
"""The reduction of torch's losses that divides by the items (ATen/core/Reduction.h)."""
_BY_LABEL = ("NllLoss",)
_BY_ELEMENT = ("MseLoss", "BinaryCrossEntropy", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss")
_KEEPS_THE_MEAN = (
    *("Div", "Mul", "Neg", "ToCopy", "Clone", "Alias", "View", "ReshapeAlias", "Squeeze", "Unsqueeze"),
    "PreBackwardFunctionForModule",  # DeepSpeed's, around the outputs of each module at stage 3
)
_SUMS = ("Add", "Sub")
_DATA_PARALLEL = "_DDPSink"
"""DistributedDataParallel's, around all outputs at once where it looks for unused parameters."""


def items_of(loss: Any) -> Any:
    """Return the number of items that a loss is the mean over.

    Args:
        loss: a scalar tensor with a graph.

    Returns:
        A scalar tensor in fp32 on the loss's device: labels without those that are ignored, elements, or the
        sum of their classes' weights. None where the graph does not tell.
    """
    import torch

    found = [_items(node) for node in _terms(loss.grad_fn, loss.output_nr)]
    if not found or any(items is None for items in found):
        return None
    if any(float(items) != float(found[0]) for items in found[1:]):
        return None
    return torch.as_tensor(found[0], dtype=torch.float32, device=loss.device)


def _terms(node: Any, place: int) -> Iterator[Any]:
    """Yield the nodes whose sum a loss is, but for factors; constants are left out."""
    waiting = [(node, place)]
    while waiting:
        node, place = waiting.pop()
        if node is None:
            continue
        kind, following = _kind(node), node.next_functions
        held = [(one, at) for one, at in following if one is not None]
        if kind == _DATA_PARALLEL and place < len(following):
            waiting.append(following[place])
        elif kind in _SUMS or (len(held) == 1 and (kind in _KEEPS_THE_MEAN or _is_mean_of_one_mean(node))):
            waiting += held
        else:
            yield node


def _items(node: Any) -> Any:
    kind = _kind(node)
    if kind == "Mean":
        return node._saved_self_sym_numel
    if getattr(node, "_saved_reduction", None) != _MEAN:
        return None
    if kind.startswith(_BY_LABEL):
        if node._saved_weight is not None:
            return node._saved_total_weight
        # Not the total weight, which is rounded where the logits are of 16 bits.
        return (node._saved_target != _signed(node._saved_ignore_index)).sum()
    if kind.startswith(_BY_ELEMENT):
        return node._saved_self.numel()
    return None


def _is_mean_of_one_mean(node: Any) -> bool:
    """Return whether a node takes the mean of a single number that is one already: loss.mean()."""
    if _kind(node) != "Mean" or node._saved_self_sym_numel != 1:
        return False
    ((below, _),) = node.next_functions
    return below is not None and _items(below) is not None


def _kind(node: Any) -> str:
    """Return the operator of a node: "NllLoss" of "NllLossBackward0"."""
    return str(node.name().rpartition("::")[2].rpartition("Backward")[0])


def _signed(number: int) -> int:
    """Return a number that autograd shows as one without a sign."""
    return number - 2**64 if number >= 2**63 else number
