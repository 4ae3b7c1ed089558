"""The cache of keys and values: its bytes for a batch, and what growing it takes beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.estimates import Term
from zerofit.planning.inference.attention_scores import LATENT_FAMILIES

if TYPE_CHECKING:
    from zerofit.core.estimates import Holder
    from zerofit.planning.estimate.closed_form.shape import Shape
    from zerofit.planning.inference.request import InferenceWorkload

CACHE = "key-value cache"
CROSS_CACHE = "cross-attention cache"
CACHE_COPY = "cache copy"
_LATENT = "; too high: this family caches latents of all heads, whose width is not known here"
_SOURCE = "transformers 5.23, cache_utils.py:136 (DynamicLayer.update)"


def cache_bytes_per_token(shape: Shape) -> int:
    """Return the bytes that one token of one sequence keeps in the self-attention of all layers.

    Layers with a sliding window keep no more than that; they are taken to keep everything.
    """
    model = shape.facts
    num_layers = model.num_decoder_layers or model.num_layers
    return num_layers * _layer_bytes(shape)


def cached_tokens(shape: Shape, workload: InferenceWorkload) -> int:
    """Return the tokens of a sequence that are cached at the end: the last new one never is."""
    prompt = 1 if shape.facts.num_decoder_layers else workload.longest_prompt
    return prompt + workload.max_new_tokens - 1


def cache_terms(
    shape: Shape, workload: InferenceWorkload, *, batch_size: int, tokens: int, holder: Holder
) -> tuple[Term, ...]:
    """Return what a batch caches once each of its sequences has so many tokens.

    Args:
        shape: the model, in the format of its weights, which is that of the cache.
        workload: tells the sequences of a prompt, and of an encoder-decoder the tokens that it attends to.
        batch_size: prompts in one call.
        tokens: of each sequence; of an encoder-decoder, those of its decoder.
        holder: who holds it.
    """
    sequences = batch_size * workload.sequences_per_prompt
    layer, each = _layer_bytes(shape), cache_bytes_per_token(shape)
    rows = f"{batch_size} prompts" + (
        f" x {workload.sequences_per_prompt} sequences" if workload.sequences_per_prompt > 1 else ""
    )
    terms = [
        Term(
            name=CACHE,
            num_bytes=each * tokens * sequences,
            holder=holder,
            formula=f"2 x layers x key-value heads x head width x b = {each} B, x {tokens} tokens x {rows}"
            + _LATENT * (shape.facts.model_type in LATENT_FAMILIES),
            source=_SOURCE,
        )
    ]
    if shape.facts.num_decoder_layers:
        terms.append(
            Term(
                name=CROSS_CACHE,
                num_bytes=each * workload.longest_prompt * sequences,
                holder=holder,
                formula=f"keys and values of the encoder's {workload.longest_prompt} tokens x {rows}",
                source="transformers 5.23, cache_utils.py (EncoderDecoderCache)",
            )
        )
    longest = max(tokens, workload.longest_prompt if shape.facts.num_decoder_layers else 0)
    terms.append(
        Term(
            name=CACHE_COPY,
            num_bytes=layer // 2 * longest * sequences,
            holder=holder,
            formula="the keys of one layer a second time, while a token is put behind them or beams change",
            source=f"{_SOURCE}; DynamicLayer.reorder_cache",
        )
    )
    return tuple(terms)


def _layer_bytes(shape: Shape) -> int:
    return 2 * shape.key_width * shape.weight_bytes
