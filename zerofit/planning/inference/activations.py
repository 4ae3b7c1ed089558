"""Tensors of a forward pass without gradients, except weights: activations, mask, logits, KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder, Term
from zerofit.planning.inference.forward_log import FUSED_GATE_FAMILIES

if TYPE_CHECKING:
    from zerofit.planning.estimate.closed_form.shape import Shape
    from zerofit.planning.inference.problem import InferenceWorkload

FUSED_FAMILIES = frozenset(
    {
        "bart", "biogpt", "cohere", "cohere2", "falcon", "gemma", "gemma3_text", "glm", "glm4", "gpt2",
        "gpt_bigcode", "gpt_neox", "granite", "granitemoe", "llama", "m2m_100", "marian", "mbart",
        "mistral", "mixtral", "mt5", "nemotron", "olmo", "olmo2", "olmoe", "opt", "pegasus", "phi",
        "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm",
        "starcoder2", "t5", "umt5"
    }
)  # fmt: skip
"""Families whose attention runs a fused kernel of torch's scaled_dot_product_attention.
Source: transformers 5.23, _supports_sdpa in models/*/modeling_*.py."""
EAGER_FAMILIES = frozenset({"bloom", "codegen", "gemma2", "gpt_neo", "gpt_oss", "gptj", "longt5", "xglm"})
"""Families that compute all scores, as is assumed of unknown families. Source: the same."""
LATENT_FAMILIES = frozenset({"deepseek_v2", "deepseek_v3"})
"""Families with multi-head latent attention: query and key are wider than the value."""
_FP32 = 4
_EAGER_TENSORS = {"gemma2": 1}
"""Tensors of the scores' size before the softmax, in the format of the weights."""
_MOST_TENSORS = 3
"""For other families: those of bloom, the most that tests/planning/inference/test_activations.py counts."""


def is_eager(shape: Shape) -> bool:
    """Return True if a family computes its scores in Python, or is unknown."""
    family = shape.facts.model_type
    return family not in FUSED_FAMILIES and family not in LATENT_FAMILIES


def scores_bytes(shape: Shape) -> int:
    """Return the bytes of the scores of one query and one key, over all heads; 0 with a fused kernel.

    Eager: scores in the format of the weights, their softmax in fp32, and its cast back. Where torch has no
    fused kernel, it computes fp32 scores and their softmax: for falcon's unrepeated single key-value head and
    for values narrower than keys. ASSUMPTION: the latter on a GPU too; observed on the CPU.
    Source: transformers 5.23, eager_attention_forward of its modeling files;
    aten/src/ATen/native/transformers/sdp_utils_cpp.h, check_batch_size_and_num_heads_dense and
    attention.cpp, _scaled_dot_product_attention_math.
    """
    model, width = shape.facts, shape.compute_bytes
    heads = max(1, model.num_attention_heads)
    if is_eager(shape):
        cast = width if width < _FP32 else 0
        return heads * (_EAGER_TENSORS.get(model.model_type, _MOST_TENSORS) * width + _FP32 + cast)
    is_unrepeated = model.model_type == "falcon" and model.num_key_value_heads == 1 < heads
    if is_unrepeated or model.model_type in LATENT_FAMILIES:
        return heads * 2 * _FP32
    return 0


def kept_scores_bytes(shape: Shape) -> int:
    """Return the bytes of these that attention returns, so that they live through the feed-forward block."""
    if not is_eager(shape):
        return 0
    tensors = min(2, _EAGER_TENSORS.get(shape.facts.model_type, _MOST_TENSORS))
    return max(1, shape.facts.num_attention_heads) * tensors * shape.compute_bytes


CACHE = "key-value cache"
CROSS_CACHE = "cross-attention cache"
CACHE_COPY = "cache copy"
_LATENT = "; too high: this family caches latents of all heads, whose width is unknown here"
_SOURCE = "transformers 5.23, cache_utils.py:136 (DynamicLayer.update)"


def cache_bytes_per_token(shape: Shape) -> int:
    """Return the self-attention cache of one token of one sequence, over all layers.

    Layers with a sliding window cache less, but are counted in full.
    """
    model = shape.facts
    num_layers = model.num_decoder_layers or model.num_layers
    return num_layers * _layer_bytes(shape)


def cached_tokens(shape: Shape, workload: InferenceWorkload) -> int:
    """Return the cached tokens of a sequence at the end: all but the last new one."""
    prompt = 1 if shape.facts.num_decoder_layers else workload.longest_prompt
    return prompt + workload.max_new_tokens - 1


def cache_terms(
    shape: Shape, workload: InferenceWorkload, *, batch_size: int, tokens: int
) -> tuple[Term, ...]:
    """Return the KV cache of a batch.

    Args:
        shape: the model; the cache has the format of its weights.
        workload: gives the sequences per prompt, and the encoder's tokens of an encoder-decoder.
        tokens: tokens per sequence; of an encoder-decoder, in its decoder.
    """
    sequences = batch_size * workload.sequences_per_prompt
    each, longest = cache_bytes_per_token(shape), tokens
    each_has = f" x {workload.sequences_per_prompt} sequences" * (workload.sequences_per_prompt > 1)
    rows = f"{batch_size} prompts{each_has}"
    formula = f"2 x layers x key-value heads x head width x b = {each} B, x {tokens} tokens x {rows}"
    formula += _LATENT * (shape.facts.model_type in LATENT_FAMILIES)
    terms = [_term(CACHE, each * tokens * sequences, formula, _SOURCE)]
    if shape.facts.num_decoder_layers:
        longest = max(tokens, workload.longest_prompt)
        formula = f"keys and values of the encoder's {workload.longest_prompt} tokens x {rows}"
        source = "transformers 5.23, cache_utils.py (EncoderDecoderCache)"
        terms.append(_term(CROSS_CACHE, each * workload.longest_prompt * sequences, formula, source))
    formula = "a copy of one layer's keys, while a token is appended or beams are reordered"
    copied = _layer_bytes(shape) // 2 * longest * sequences
    return *terms, _term(CACHE_COPY, copied, formula, f"{_SOURCE}; DynamicLayer.reorder_cache")


def _term(name: str, num_bytes: int, formula: str, source: str) -> Term:
    return Term(name=name, num_bytes=num_bytes, holder=Holder.TENSORS, formula=formula, source=source)


def _layer_bytes(shape: Shape) -> int:
    return 2 * shape.key_width * shape.weight_bytes


ACTIVATIONS, MASK, LOGITS = "activations of one layer", "attention mask", "logits"
ENCODER_OUTPUTS, SCORES = "encoder outputs", "attention scores"
_POSITION_BIAS_FAMILIES = frozenset({"t5", "mt5", "umt5", "longt5"})
"""Families that add a bias of (heads, tokens, tokens) to the scores, so that the mask has a head dimension.
Source: transformers 5.23, integrations/sdpa_attention.py, create_position_bias_mask."""
_FUSED_GATE_TENSORS = 4
"""Tensors of the inner width: gate and up in one, the activated gate, and their product."""
_INNER_TENSORS = {"bloom": 5, "phi": 4, **dict.fromkeys(FUSED_GATE_FAMILIES, _FUSED_GATE_TENSORS)}
"""Tensors of the inner width in families whose feed-forward block holds more than most: the activation is
written in Python, or gate and up are fused. Counted in tests/planning/inference/test_activations.py."""
_FP32_KEY_FAMILIES = frozenset({"codegen", "gpt_neo", "gptj"})
"""Families that compute scores in fp32. Source: transformers 5.23, GPTJAttention._attn and its likes."""
_TWO_MASK_FAMILIES = frozenset({"cohere2", "gemma2", "gemma3_text", "gpt_oss"})
"""Families with a full mask and a sliding-window mask. Source: transformers 5.23, config.layer_types."""
_GATE_TENSORS = {"gpt_oss": 9}
"""For experts with another gate: with biases, clamping and its own sigmoid.
Source: transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, _apply_gate."""
_LOGITS_COPIES = 4
"""ASSUMPTION: fp32 tensors of the logits' size that live at one time: their copy, the scores, and two of a
sort or a softmax in sampling and beam search."""


def prefill_terms(shape: Shape, workload: InferenceWorkload, *, batch_size: int) -> tuple[Term, ...]:
    """Return the tensors of the forward pass of a batch of prompts, without the cache."""
    # An encoder reads each prompt once, a decoder once per sequence.
    is_pair = bool(shape.facts.num_decoder_layers)
    rows = batch_size if is_pair else batch_size * workload.sequences_per_prompt
    tokens = workload.longest_prompt
    return _pass_terms(shape, workload, batch_size, rows, queries=tokens, keys=tokens)


def decode_terms(
    shape: Shape, workload: InferenceWorkload, *, batch_size: int, tokens: int
) -> tuple[Term, ...]:
    """Return the tensors of the forward pass of one new token per sequence, without the cache.

    Args:
        tokens: tokens per sequence that the new one attends to.
    """
    rows = batch_size * workload.sequences_per_prompt
    return _pass_terms(shape, workload, batch_size, rows, queries=1, keys=tokens)


def _pass_terms(
    shape: Shape, workload: InferenceWorkload, batch_size: int, rows: int, *, queries: int, keys: int
) -> tuple[Term, ...]:
    """Return the tensors of a pass over `rows` rows of `queries` tokens, which attend to `keys` tokens."""
    sequences = batch_size * workload.sequences_per_prompt
    terms = [
        *_layer_terms(shape, rows, queries=queries, keys=keys),
        _mask_term(shape, rows, queries=queries, keys=keys),
        _logits_term(shape, sequences),
    ]
    if shape.facts.num_decoder_layers:
        tokens = sequences * workload.longest_prompt
        num_bytes = tokens * shape.facts.hidden_size * shape.compute_bytes
        formula = f"{tokens} tokens x width x b, for the whole call"
        source = "transformers 5.23, generation/utils.py, _prepare_encoder_decoder_kwargs_for_generation"
        terms.append(_term(ENCODER_OUTPUTS, num_bytes, formula, source))
    return tuple(terms)


def _layer_terms(shape: Shape, rows: int, *, queries: int, keys: int) -> tuple[Term, ...]:
    """Return the largest of a layer's norm, attention and feed-forward block, with the residual streams."""
    tokens, width, pairs = rows * queries, shape.compute_bytes, rows * queries * keys
    scores = {"attention": pairs * scores_bytes(shape), "feed-forward": pairs * kept_scores_bytes(shape)}
    parts = {
        "norm": tokens * _norm_bytes(shape),
        "attention": tokens * _attention_bytes(shape)
        + rows * _copied_keys_bytes(shape, queries=queries, keys=keys)
        + pairs * _bias_bytes(shape),
        "feed-forward": tokens * _feed_forward_bytes(shape),
    }
    largest = max(parts, key=lambda name: parts[name] + scores.get(name, 0))
    streams = 2 if shape.has_rms_norm else 3  # the embeddings, the residual, and learned positions
    num_bytes = tokens * streams * shape.facts.hidden_size * width + parts[largest]
    formula = f"{tokens} tokens x ({streams} streams + {largest}, the largest part of a layer)"
    test = "tests/planning/inference/test_activations.py"
    source = f"transformers' modeling files; {test} compares it with tensors"
    activations = _term(ACTIVATIONS, num_bytes, formula, source)
    if not scores.get(largest):
        return (activations,)
    formula = f"{rows} rows x {queries} x {keys} x heads x their tensors, with the softmax in fp32"
    source = "zerofit.planning.inference.activations; transformers 5.23, _supports_sdpa"
    if is_eager(shape) and shape.facts.model_type not in EAGER_FAMILIES:
        formula += ", as this family is not known to have a fused kernel"
        source = "ASSUMPTION: as an unknown family's attention is eager"
    return activations, _term(SCORES, scores[largest], formula, source)


def _norm_bytes(shape: Shape) -> int:
    """Return the bytes per token of a norm: RMS norms compute in fp32, with a square and a product."""
    return shape.facts.hidden_size * (2 * _FP32 * shape.has_rms_norm + shape.compute_bytes)


def _attention_bytes(shape: Shape) -> int:
    """Return the bytes per token of attention: input, query, key, value and output.

    Eager code also holds the fused product that they come from.
    """
    query, key = shape.query_width, shape.key_width
    product = query + 2 * key if shape.query_casts == 1 and is_eager(shape) else 0
    return shape.compute_bytes * (shape.facts.hidden_size + 2 * query + 2 * key + product)


def _copied_keys_bytes(shape: Shape, *, queries: int, keys: int) -> int:
    """Return the bytes per sequence of keys and values that are repeated for grouped query heads.

    For a single query, fused kernels take them unrepeated. Some families cast all keys to fp32.
    Source: transformers 5.23, integrations/sdpa_attention.py, repeat_kv and pack_gqa; GPTJAttention._attn.
    """
    if shape.facts.model_type in _FP32_KEY_FAMILIES:
        return keys * shape.query_width * _FP32
    if shape.key_width >= shape.query_width or (queries == 1 and not scores_bytes(shape)):
        return 0
    return 2 * keys * shape.query_width * shape.compute_bytes


def _bias_bytes(shape: Shape) -> int:
    """Return the bytes per query and key of a position bias with the mask, and its contiguous copy."""
    has_bias = shape.facts.model_type in _POSITION_BIAS_FAMILIES
    return 2 * shape.facts.num_attention_heads * shape.compute_bytes if has_bias else 0


def _feed_forward_bytes(shape: Shape) -> int:
    """Return the bytes per token of a feed-forward block: residual, input, and the tensors inside.

    These are one less than training keeps: the activation's input is freed. A fused gate-and-up product lives
    until both are used.
    """
    width, inner = shape.compute_bytes, shape.inner_width
    streams = (2 if shape.has_rms_norm else 3) * shape.facts.hidden_size * width
    if shape.facts.num_experts > 1:
        return streams + max(1, shape.facts.num_experts_per_token) * _expert_bytes(shape)
    tensors = _INNER_TENSORS.get(shape.facts.model_type)
    return streams + inner * (tensors * width if tensors else max(2 * width, shape.inner_bytes - width))


def _expert_bytes(shape: Shape) -> int:
    """Return the bytes per token in one expert: the larger of its gate and the weighted sum at the end.

    The gate has the expert's input beside it; the end has input, output, weighted and reordered output.
    Source: transformers 5.23, integrations/moe.py:424 (grouped_mm_experts_forward).
    """
    hidden, tensors = shape.facts.hidden_size, _GATE_TENSORS.get(shape.facts.model_type, _FUSED_GATE_TENSORS)
    return shape.compute_bytes * max(hidden + tensors * shape.inner_width, 4 * hidden)


def _mask_term(shape: Shape, rows: int, *, queries: int, keys: int) -> Term:
    each = (1 + shape.compute_bytes) * (2 if shape.facts.model_type in _TWO_MASK_FAMILIES else 1)
    formula = f"{rows} rows x {queries} x {keys} x {each} B, as booleans and as numbers"
    kernel = "aten/src/ATen/native/transformers/attention.cpp, convert_boolean_attn_mask"
    return _term(MASK, rows * queries * keys * each, formula, f"ASSUMPTION: batches have padding; {kernel}")


def _logits_term(shape: Shape, rows: int) -> Term:
    each = shape.compute_bytes + _LOGITS_COPIES * _FP32
    formula = f"{rows} rows x vocabulary x {each} B: of the last token alone, with their copies in fp32"
    source = "transformers 5.23, generation/utils.py:2953, :3247; number of copies: ASSUMPTION"
    return _term(LOGITS, rows * shape.facts.vocab_size * each, formula, source)
