"""CostBook: the floating-point operations and bytes of each operator call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import COLLECTIVES, EXPERT_ROWS, CostKind
from zerofit.core.strategy import Precision
from zerofit.core.upstream.torch import sparse_parts
from zerofit.models.trace.attention import seen_share
from zerofit.models.trace.raw import OperatorCall
from zerofit.models.trace.sparse import is_sparse
from zerofit.models.trees import leaves

if TYPE_CHECKING:
    from zerofit.core.allocation_log import Pass

_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "_reshape_alias", "detach"}
"""Operators that access no memory."""
_GROUPED = {"_grouped_mm": 1, "grouped_mm_fallback": 1, "grouped_mm_fallback_backward": 2}
"""Products of experts in one call, by operator: torch's, and transformers' own where it can't run."""
_RECURRENT = {"mkldnn_rnn_layer": 1, "mkldnn_rnn_layer_backward": 2}
"""Products with both weights of an LSTM's layer in one call, by the operator of the CPU."""


_OF_TORCH = "c10d"
"""The namespace of torch's own collectives, whose last tensor is the input."""


class CostBook:
    """Counts operations by PyTorch's registry of formulas (torch.utils.flop_counter)."""

    def __init__(self) -> None:
        import torch
        from torch.utils.flop_counter import flop_registry

        self._tensor = torch.Tensor
        self._formulas = flop_registry
        self._precisions = {torch.float16: Precision.FP16, torch.bfloat16: Precision.BF16}
        self._is_free: dict[Any, bool] = {}
        self._causal_at: dict[Any, int] = {}

    def call(
        self,
        operator: int,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        outputs: list[Any],
        during: Pass,
    ) -> OperatorCall[int] | None:
        """Return the cost of one call, or None if it only makes a view."""
        is_free = self._is_free.get(function)
        if is_free is None:
            is_free = self._is_free[function] = _makes_a_view(function)
        if is_free:
            return None
        inputs = [leaf for _, leaf in leaves(args) if isinstance(leaf, self._tensor)]
        formula = self._formulas.get(function._overloadpacket)
        name = function._overloadpacket.__name__
        is_attention = "attention" in name
        counted = self._with_all_heads(args) if is_attention else args
        grouped = _grouped_flops(function, args)
        flops = int(formula(*counted, **kwargs, out_val=out)) if formula else grouped
        if name == "convolution_backward":
            flops = _convolution_flops(args)
        elif name in _RECURRENT:
            steps, samples, _ = map(int, args[0].shape)
            flops = 2 * _RECURRENT[name] * steps * samples * int(args[1].numel() + args[2].numel())
        kind = CostKind.MEMORY
        if flops:
            kind = CostKind.GROUPED if grouped else CostKind.MATMUL
            kind = CostKind.ATTENTION if is_attention else kind
            if is_attention:  # the formulas count the full square of scores
                query = args["backward" in name]
                seen, of = seen_share(query, is_causal=self._is_causal(function, args, kwargs))
                flops = flops * seen // of
        is_exchange = function.namespace in (COLLECTIVES, _OF_TORCH)
        if is_exchange:
            kind = CostKind.EXCHANGE if function.namespace == COLLECTIVES else CostKind.COLLECTIVE
        precision = self._precision(inputs or outputs)
        moved = sum(_touched(tensor) for tensor in (inputs[-1:] if is_exchange else (*inputs, *outputs)))
        return OperatorCall(operator, kind, during, precision, flops, moved)

    def kernel(self, operator: int, tensors: list[Any], flops: int, during: Pass) -> OperatorCall[int]:
        """Return the cost of a kernel with this number of operations and these tensors."""
        kind = CostKind.MATMUL if flops else CostKind.MEMORY
        moved = sum(map(_touched, tensors))
        return OperatorCall(operator, kind, during, self._precision(tensors), flops, moved)

    def host_copy(self, operator: int, tensor: Any, during: Pass) -> OperatorCall[int]:
        """Return the cost of a tensor's copy to the host or from it."""
        num_bytes = int(tensor.numel()) * int(tensor.element_size())
        return OperatorCall(operator, CostKind.HOST_COPY, during, self._precision([tensor]), 0, num_bytes)

    def _precision(self, tensors: list[Any]) -> Precision:
        first = next((tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point), None)
        return self._precisions.get(first, Precision.FP32)

    def _with_all_heads(self, args: tuple[Any, ...]) -> list[Any]:
        """Return an attention kernel's arguments for its formula, which in torch 2.8 lacks GQA.

        Key heads are expanded to all query heads: (samples, heads, tokens, channels).
        """
        shapes = [tuple(arg.shape) if isinstance(arg, self._tensor) else arg for arg in args]
        heads = max((shape[1] for shape in shapes if _is_of_heads(shape)), default=0)
        return [(shape[0], heads, *shape[2:]) if _is_of_heads(shape) else shape for shape in shapes]

    def _is_causal(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if an attention kernel is called with a causal mask."""
        place = self._causal_at.get(function)
        if place is None:
            names = [argument.name for argument in function._schema.arguments]
            place = self._causal_at[function] = names.index("is_causal")
        return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def _is_of_heads(shape: Any) -> bool:
    return isinstance(shape, tuple) and len(shape) == 4


def _grouped_flops(function: Any, args: tuple[Any, ...]) -> int:
    """Count a grouped product, for which PyTorch has no formula.

    The dimension that is split among experts is the rows, in the gradient of the weights the summed one, and
    with a matrix of each expert by a common one the columns. Of two stacks of matrices each is a product.
    """
    name = function._overloadpacket.__name__
    if name not in _GROUPED:
        return 0
    first, second = args[:2]
    sizes = [int(number) for number in (*first.shape[-2:], second.shape[-1])]
    split = {(2, 3): 0, (2, 2): 1, (3, 2): 2}.get((first.dim(), second.dim()))
    if split is None:
        sizes.append(int(first.shape[0]))
    else:
        sizes[split] += EXPERT_ROWS * int(args[2].numel())
    return 2 * _GROUPED[name] * math.prod(sizes)


def _convolution_flops(args: tuple[Any, ...]) -> int:
    """Count the gradients of a convolution, each of which costs what the convolution does.

    PyTorch's formula takes all channels for the weight's gradient, whatever the groups: a depthwise
    convolution, as in Mamba, costs as many times too much as it has channels.
    """
    gradient, given, weight, transposed, wanted = (args[place] for place in (0, 1, 2, 7, 10))
    places = math.prod((given if transposed else gradient).shape[2:])
    return int(2 * gradient.shape[0] * places * weight.numel() * sum(wanted[:2]))


def _touched(tensor: Any) -> int:
    if is_sparse(tensor):
        return sum(_touched(part) for part in sparse_parts(tensor))
    return min(int(tensor.numel()) * int(tensor.element_size()), int(tensor.untyped_storage().nbytes()))


def _makes_a_view(function: Any) -> bool:
    if function._overloadpacket.__name__ in _FREE:
        return True
    returned = [output.alias_info for output in function._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)
