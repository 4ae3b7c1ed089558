"""Free memory of a rank before a call of generate, and the memory of its cache and activations."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from zerofit.machine.this_node import free_host_bytes

if TYPE_CHECKING:
    from torch.nn import Module

_CACHE_COPIES = 2
"""A cache grows by a copy of each layer with every token; its old blocks are too small to reuse, and stay in
PyTorch's allocator until it releases them. ASSUMPTION: at most doubling it."""
_LOGITS_COPIES = 4
"""In 32 bits each: of the model, of the processors, their softmax and sorting. ASSUMPTION."""
_BLOCK_COPIES = 8
"""Live tensors of a block's maximum width without gradients. ASSUMPTION."""


def free_bytes() -> int:
    """Return the bytes this rank can still allocate: on its GPU; on the CPU, its share of host memory."""
    import torch
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cuda":
        free, _ = torch.cuda.mem_get_info()
        # Cached blocks of the allocator are reused, or released to the GPU if they don't fit.
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.distributed.get_world_size()
    return int(free_host_bytes() // ranks_here)


def working_bytes(model: Module, *, num_sequences: int, num_prompt_tokens: int, max_new_tokens: int) -> int:
    """Estimate the bytes of one generate() call on one rank without the weights, rather too high.

    Args:
        num_sequences: rows of the batch, times beams or returned sequences.
    """
    config = model.config.get_text_config(decoder=True)
    itemsize = int(model.dtype.itemsize)
    # An encoder-decoder caches keys and values of its own tokens and of the prompt.
    cache = cache_elements(config) * num_sequences * (num_prompt_tokens + max_new_tokens) * itemsize
    logits = num_sequences * _size(config, "vocab_size") * 4
    widths = ("hidden_size", "intermediate_size", "ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner")
    width = max(_size(config, name) for name in widths)
    block = num_sequences * num_prompt_tokens * width * itemsize
    return cache * _CACHE_COPIES + logits * _LOGITS_COPIES + block * _BLOCK_COPIES


def cache_elements(config: Any) -> int:
    """Return the elements that a decoder's KV cache stores per token, over all layers.

    Args:
        config: of the decoder; 0 for one without attention.
    """
    heads = _size(config, "num_attention_heads")
    kept_heads = _size(config, "num_key_value_heads", "num_kv_heads") or heads
    head_dim = _size(config, "head_dim", "d_kv") or (_size(config, "hidden_size") // heads if heads else 0)
    return 2 * _size(config, "num_decoder_layers", "num_hidden_layers") * kept_heads * head_dim


def _size(config: Any, *names: str) -> int:
    """Return the first of these settings that the model has, its largest layer's; 0 if it has none."""
    for name in names:
        found = getattr(config, name, None)
        largest = max(found, default=0) if isinstance(found, list | tuple) else found
        if isinstance(largest, int) and largest > 0:
            return largest
    return 0
