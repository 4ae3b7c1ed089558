"""What a forward pass without gradients holds at its largest moment: one layer's tensors, mask and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.estimates import Term

if TYPE_CHECKING:
    from zerofit.estimate.closed_form_shape import Shape
    from zerofit.estimates import Holder
    from zerofit.inference.asked import InferenceWorkload

ACTIVATIONS, MASK, LOGITS = "activations of one layer", "attention mask", "logits"
ENCODER_OUTPUTS = "encoder outputs"
_FP32 = 4
_POSITION_BIAS_FAMILIES = frozenset({"t5", "mt5", "umt5", "longt5"})
"""Families that add a bias of (heads, tokens, tokens) to the scores, so that the mask has the heads too.
Source: transformers 5.23, integrations/sdpa_attention.py, create_position_bias_mask."""
_LOGITS_COPIES = 4
"""ASSUMPTION: fp32 tensors of the logits' size that are alive together: their copy, the scores, and two of a
sort or a softmax under sampling and beams."""


def prefill_terms(
    shape: Shape, workload: InferenceWorkload, *, batch_size: int, holder: Holder
) -> tuple[Term, ...]:
    """Return what the prompts of a batch take on their way through the model, their cache left out.

    Args:
        shape: the model, in the format of its weights.
        workload: its longest prompt, to which the others are padded.
        batch_size: prompts in one call.
        holder: who holds it.
    """
    is_pair = bool(shape.facts.num_decoder_layers)
    # An encoder sees each prompt once; a decoder sees it once for each sequence.
    rows = batch_size if is_pair else batch_size * workload.sequences_per_prompt
    tokens = workload.longest_prompt
    return (
        _layer_term(shape, rows, queries=tokens, keys=tokens, holder=holder),
        _mask_term(shape, rows, queries=tokens, keys=tokens, holder=holder),
        _logits_term(shape, batch_size * workload.sequences_per_prompt, holder),
        *((_encoder_outputs(shape, workload, batch_size, holder),) if is_pair else ()),
    )


def decode_terms(
    shape: Shape, workload: InferenceWorkload, *, batch_size: int, tokens: int, holder: Holder
) -> tuple[Term, ...]:
    """Return what one new token of each sequence takes on its way through the model, the cache left out.

    Args:
        shape: the model, in the format of its weights.
        workload: tells the sequences of a prompt.
        batch_size: prompts in one call.
        tokens: of each sequence, which the new one attends to.
        holder: who holds it.
    """
    rows = batch_size * workload.sequences_per_prompt
    is_pair = bool(shape.facts.num_decoder_layers)
    return (
        _layer_term(shape, rows, queries=1, keys=tokens, holder=holder),
        _mask_term(shape, rows, queries=1, keys=tokens, holder=holder),
        _logits_term(shape, rows, holder),
        *((_encoder_outputs(shape, workload, batch_size, holder),) if is_pair else ()),
    )


def _layer_term(shape: Shape, rows: int, *, queries: int, keys: int, holder: Holder) -> Term:
    """Return the largest of a layer's norm, attention and feed-forward block, with the streams beside it.

    Args:
        shape: the model.
        rows: sequences.
        queries: tokens of each that go through the model.
        keys: tokens of each that they attend to.
        holder: who holds it.
    """
    tokens, width = rows * queries, shape.compute_bytes
    parts = {
        "norm": tokens * _norm_bytes(shape),
        "attention": tokens * _attention_bytes(shape) + rows * queries * keys * _bias_bytes(shape),
        "feed-forward": tokens * _feed_forward_bytes(shape),
    }
    largest = max(parts, key=lambda name: parts[name])
    streams = 2 if shape.has_rms_norm else 3  # the embeddings, the residual, and learned positions
    return Term(
        name=ACTIVATIONS,
        num_bytes=tokens * streams * shape.facts.hidden_size * width + parts[largest],
        holder=holder,
        formula=f"{tokens} tokens x ({streams} streams + {largest}, the largest part of a layer)",
        source="transformers' modeling files; tests/inference/test_activations.py compares it with tensors",
    )


def _norm_bytes(shape: Shape) -> int:
    """Return the bytes a token of a norm: RMS norms compute in fp32, with a square and a product."""
    return shape.facts.hidden_size * (2 * _FP32 * shape.has_rms_norm + shape.compute_bytes)


def _attention_bytes(shape: Shape) -> int:
    """Return the bytes a token of attention: its input, query, key, value and result.

    Where query heads share keys and values and a mask has padding, both are repeated for each query head.
    Source: transformers 5.23, integrations/sdpa_attention.py, repeat_kv.
    """
    query, key = shape.query_width, shape.key_width
    repeated = 2 * query if key < query else 0
    return shape.compute_bytes * (shape.facts.hidden_size + 2 * query + 2 * key + repeated)


def _bias_bytes(shape: Shape) -> int:
    """Return the bytes of a query and a key of a position bias with the mask in it, and a contiguous copy."""
    has_bias = shape.facts.model_type in _POSITION_BIAS_FAMILIES
    return 2 * shape.facts.num_attention_heads * shape.compute_bytes if has_bias else 0


def _feed_forward_bytes(shape: Shape) -> int:
    """Return the bytes a token of a feed-forward block: residual, input, and what is alive inside.

    That is one tensor less than training keeps there: the gate once it is activated, or what activation took.
    """
    uses = max(1, shape.facts.num_experts_per_token)
    inside = max(2 * shape.compute_bytes, shape.inner_bytes - shape.compute_bytes)
    streams = 2 if shape.has_rms_norm else 3
    return streams * shape.facts.hidden_size * shape.compute_bytes + uses * shape.inner_width * inside


def _mask_term(shape: Shape, rows: int, *, queries: int, keys: int, holder: Holder) -> Term:
    width = shape.compute_bytes
    return Term(
        name=MASK,
        num_bytes=rows * queries * keys * (1 + width),
        holder=holder,
        formula=f"{rows} rows x {queries} x {keys} x (1 + {width} B), as booleans and as numbers",
        source="ASSUMPTION: batches have padding; aten/src/ATen/native/transformers/attention.cpp,"
        " convert_boolean_attn_mask",
    )


def _logits_term(shape: Shape, rows: int, holder: Holder) -> Term:
    each = shape.compute_bytes + _LOGITS_COPIES * _FP32
    return Term(
        name=LOGITS,
        num_bytes=rows * shape.facts.vocab_size * each,
        holder=holder,
        formula=f"{rows} rows x vocabulary x {each} B: of the last token alone, with their copies in fp32",
        source="transformers 5.23, generation/utils.py:2953, :3247; number of copies: ASSUMPTION",
    )


def _encoder_outputs(shape: Shape, workload: InferenceWorkload, batch_size: int, holder: Holder) -> Term:
    rows = batch_size * workload.sequences_per_prompt
    tokens = rows * workload.longest_prompt
    return Term(
        name=ENCODER_OUTPUTS,
        num_bytes=tokens * shape.facts.hidden_size * shape.compute_bytes,
        holder=holder,
        formula=f"{tokens} tokens x width x b, for the whole call",
        source="transformers 5.23, generation/utils.py, _prepare_encoder_decoder_kwargs_for_generation",
    )
