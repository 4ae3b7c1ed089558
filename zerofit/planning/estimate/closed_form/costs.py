"""The work of a transformer in closed form: FLOPs and bytes of each kind of operator, pass by pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.allocation_log import CostKind, OperatorCost, Pass
from zerofit.core.strategy import Precision

if TYPE_CHECKING:
    from zerofit.planning.estimate.closed_form.shape import Shape

_ATTENTION_BACKWARD = 2.5
"""The backward kernel makes five matrix products, the forward kernel two.
Source: https://arxiv.org/abs/2307.08691 (section 2.3)."""
_LAYER_OPERATORS, _RMS_LAYER_OPERATORS, _CASTS = 11, 30, 16
"""Memory-bound operators of one layer's forward pass, with norms in one kernel and with RMS norms and rotary
embeddings written out; and what autocast adds, of weights, biases and inputs. Counted in traces of BERT and
Llama (transformers 5.23)."""
_BACKWARD_OPERATORS, _BACKWARD_BYTES = 1.5, 1.4
"""Memory-bound operators of the backward pass for each of the forward pass, in the same traces; and the bytes
of each, by those of a forward one."""
_ROTARY_PASSES = 8
"""Tensors read or written for each of query and key while they are rotated. ASSUMPTION."""
_SCORE_PASSES = 6
"""Pointwise operators on the scores: scale, mask, softmax with its casts, dropout. ASSUMPTION."""
_STEP_PASSES = 6
"""Tensors as large as the fp32 logits that the loss reads or writes in either pass. ASSUMPTION."""


def closed_form_costs(shape: Shape) -> tuple[OperatorCost, ...]:
    """Return the costs of one micro-batch: 2 FLOPs an element of a matrix and token forward, 4 backward."""
    costs = []
    for layer, count in _kinds_of_layers(shape):
        costs += _of_layer(shape, layer, count)
    if shape.logits_width:
        costs += _of_head(shape)
    return tuple(costs)


def _kinds_of_layers(shape: Shape) -> list[tuple[int, int]]:
    """Return one layer of each kind with how many there are: encoder's, decoder's."""
    decoders = shape.facts.num_decoder_layers
    kinds = [(0, shape.facts.num_layers - decoders), (shape.facts.num_layers - 1, decoders)]
    return [(layer, count) for layer, count in kinds if count > 0]


def _of_layer(shape: Shape, layer: int, count: int) -> list[OperatorCost]:
    tokens, width = shape.tokens(layer), shape.compute_bytes
    costs: list[OperatorCost] = []
    for matrix in shape.matrices(layer):
        flops = 2 * tokens * matrix.rows * matrix.columns * matrix.uses
        moved = width * tokens * (matrix.rows + matrix.columns) * matrix.uses
        fixed = width * matrix.num_elements
        costs += _passes(
            shape,
            matrix.name,
            CostKind.MATMUL,
            count,
            flops=flops,
            moved=moved,
            fixed=fixed,
            backward_calls=2,
            # Recomputation stops at the last tensor that is needed, and this one's product is not.
            recomputed=shape.recomputed_share(layer) if matrix.name != "mlp.down" else 0.0,
        )
    attentions = count * (2 if shape.is_decoder(layer) and shape.facts.num_decoder_layers else 1)
    costs += _of_eager_attention(shape, layer, attentions) or _of_fused_attention(shape, layer, attentions)
    operators, casts = _RMS_LAYER_OPERATORS if shape.has_rms_norm else _LAYER_OPERATORS, 0
    if shape.is_cast:
        operators += _CASTS
        casts = 6 * sum(matrix.num_elements for matrix in shape.matrices(layer)) // operators
    moved = _memory_bytes(shape, layer) // operators
    costs += _passes(
        shape,
        "pointwise",
        CostKind.MEMORY,
        count * operators,
        recomputed=shape.recomputed_share(layer),
        moved=moved,
        fixed=casts,
        backward_calls=_BACKWARD_OPERATORS,
        backward_moved=int(_BACKWARD_BYTES * moved),
    )
    return costs


def _of_fused_attention(shape: Shape, layer: int, count: int) -> list[OperatorCost]:
    """Return the costs of the flash or memory-efficient kernel, which skips what a causal mask hides."""
    tokens, width = shape.tokens(layer), shape.compute_bytes
    is_halved = shape.facts.is_causal and not shape.request.is_padded
    flops = 4 * tokens * tokens * shape.query_width // (2 if is_halved else 1)
    return _passes(
        shape,
        "attention",
        CostKind.ATTENTION,
        count,
        recomputed=shape.recomputed_share(layer),
        flops=flops,
        moved=width * tokens * 2 * (shape.query_width + shape.key_width),
        backward_flops=int(_ATTENTION_BACKWARD * flops),
    )


def _of_eager_attention(shape: Shape, layer: int, count: int) -> list[OperatorCost]:
    """Return the costs of attention written out: two products, and what is done to the scores between."""
    if shape.request.attention != "eager":
        return []
    tokens, width = shape.tokens(layer), shape.compute_bytes
    scores = shape.facts.num_attention_heads * tokens * tokens
    products = _passes(
        shape,
        "scores",
        CostKind.MATMUL,
        2 * count,
        recomputed=shape.recomputed_share(layer),
        flops=2 * tokens * tokens * shape.query_width,
        moved=width * (scores + 2 * tokens * shape.query_width),
        backward_calls=2,
    )
    passes = _SCORE_PASSES if shape.has_dropout else _SCORE_PASSES - 2
    softmax = _passes(
        shape,
        "softmax",
        CostKind.MEMORY,
        passes * count,
        recomputed=shape.recomputed_share(layer),
        moved=2 * width * scores,
    )
    return [*products, *softmax]


def _memory_bytes(shape: Shape, layer: int) -> int:
    """Return the bytes a sample that the pointwise operators of one layer's forward pass move."""
    facts, width, stream = shape.facts, shape.compute_bytes, shape.stream_bytes
    uses = max(1, facts.num_experts_per_token)
    norm = (2 * stream + 24 + 3 * width) if shape.has_rms_norm else (stream + 2 * width)
    sums = 3 * stream + (3 * width + 1 if shape.has_dropout else 0)
    rotary = _ROTARY_PASSES * width * (shape.query_width + shape.key_width) if shape.has_rms_norm else 0
    activation = (width + shape.inner_bytes) * shape.inner_width * uses
    return shape.tokens(layer) * (2 * (norm + sums) * facts.hidden_size + rotary + activation)


def _of_head(shape: Shape) -> list[OperatorCost]:
    tokens = shape.tokens(shape.facts.num_layers - 1)
    hidden, columns, width = shape.facts.hidden_size, shape.logits_width, shape.compute_bytes
    matmul = _passes(
        shape,
        "head",
        CostKind.MATMUL,
        1,
        flops=2 * tokens * hidden * columns,
        moved=width * tokens * (hidden + columns),
        fixed=width * hidden * columns,
        backward_calls=2,
    )
    loss = _passes(
        shape,
        "loss",
        CostKind.MEMORY,
        _STEP_PASSES,
        moved=4 * tokens * columns,
        backward_moved=4 * tokens * columns,
    )
    return [*matmul, *loss]


def _passes(
    shape: Shape,
    operator: str,
    kind: CostKind,
    count: int,
    *,
    flops: int = 0,
    moved: int = 0,
    fixed: int = 0,
    backward_calls: float = 1,
    backward_flops: int | None = None,
    backward_moved: int | None = None,
    recomputed: float = 0.0,
) -> list[OperatorCost]:
    """Return one operator's costs: forward, again forward in the part that is recomputed, and backward."""
    precision = shape.precision if kind is not CostKind.MEMORY else Precision.FP32

    def cost(during: Pass, calls: int, flops: int, moved: int) -> OperatorCost:
        return OperatorCost(
            operator=operator,
            kind=kind,
            during=during,
            precision=precision,
            count=calls,
            fixed_flops=0,
            flops_per_sample=flops,
            fixed_bytes=fixed,
            bytes_per_sample=moved,
        )

    costs = [cost(Pass.FORWARD, count, flops, moved)]
    if again := round(count * recomputed):
        costs.append(cost(Pass.RECOMPUTATION, again, flops, moved))
    # Of a frozen weight there is no gradient: one product backward, that of its input.
    trains = shape.trains("head.weight") if operator == "head" else shape.trains_layers
    frozen = kind is CostKind.MATMUL and not trains
    calls = round(count * (1 if frozen else backward_calls))
    costs.append(
        cost(
            Pass.BACKWARD,
            calls,
            flops if backward_flops is None else backward_flops,
            moved if backward_moved is None else backward_moved,
        )
    )
    return costs
