"""A model that runs LitGPT's operators, for traces of published runs of LitGPT.

LitGPT's models are its own code, and keep other tensors for the backward pass than transformers' do: one
product for query, key and value; rotary embeddings in fp32; LoRA's update padded with zeros where the key
would be; a head that runs over 128 tokens at a time, and logits in fp32. Weights and adapters are in bf16.

Source: https://github.com/Lightning-AI/litgpt, lit_gpt/{model,lora,adapter,adapter_v2,rmsnorm}.py at 6178c7cc
(24 October 2023), and finetune/{lora,adapter,adapter_v2}.py at 0f021f3a (18 January 2024).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.models.trace.cache import key_of, read_trace, write_trace
from zerofit.models.trace.entry import trace_made
from zerofit.models.trace.packed import packed_like
from zerofit.models.trace.prepare import replaceable_parameters

if TYPE_CHECKING:
    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.models.source import ModelSource

_HEAD_CHUNK = 128
"""Tokens that the head takes at a time: lm_head_chunk_size of finetune/lora.py."""
_LORA_DROPOUT, _LORA_ALPHA = 0.05, 16
_PROMPT_LENGTH, _FIRST_ADAPTED = 10, 2
"""Of adapters: learned tokens a layer, and the first layer that has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What decides the shapes of a model: lit_gpt/config.py."""

    vocabulary: int
    width: int
    num_layers: int
    num_heads: int
    num_groups: int
    """Of query heads that share a key head."""
    mlp_width: int
    rotary_width: int
    """Elements of a head that are rotated."""
    is_llama: bool
    """True for RMS norms and a gated MLP."""
    is_parallel: bool
    """True if attention and MLP read the same residual."""
    shares_norm: bool
    has_bias: bool
    has_head_bias: bool
    gelu: str
    """torch's approximation of it."""

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_groups) * self.head_width


def sizes_of(config: dict[str, Any]) -> Sizes:
    """Return LitGPT's sizes of a model of transformers, by its config.json."""
    family, heads, width = config["model_type"], config["num_attention_heads"], config["hidden_size"]
    groups, rotary = config.get("num_key_value_heads", heads), 1.0
    is_phi, is_neox = family == "phi", family == "gpt_neox"
    if is_phi:
        rotary = config["partial_rotary_factor"]
    elif is_neox:
        rotary = config["rotary_pct"]
    elif family == "falcon":
        groups = config["num_kv_heads"] if config.get("new_decoder_architecture") else 1
    elif family != "llama":
        raise ValueError(f"how LitGPT builds {family} is not written down here")
    return Sizes(
        vocabulary=config["vocab_size"],
        width=width,
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_groups=groups,
        mlp_width=config.get("intermediate_size", 4 * width),
        rotary_width=int(rotary * width / heads),
        is_llama=family == "llama",
        is_parallel=family != "llama",
        shares_norm=is_phi or (family == "falcon" and groups == 1),
        has_bias=is_phi or is_neox,
        has_head_bias=is_phi,
        gelu="tanh" if is_phi else "none",
    )


def trace_litgpt(
    source: ModelSource, request: TraceRequest, *, adapter: int = 0, cache_folder: Path
) -> Trace:
    """Return the logs of LitGPT's model.

    Args:
        source: gives its sizes.
        request: its rank of LoRA, which query and value get, and its quantization count.
        adapter: 1 or 2 for LitGPT's adapters of that version; 0 for LoRA.
        cache_folder: where traces are kept.
    """
    made_by = f"{key_of(source, request)} {adapter}".encode() + Path(__file__).read_bytes()
    path = cache_folder / f"{hashlib.sha256(made_by).hexdigest()[:40]}.trace"
    found = read_trace(path, request)
    if found is None:
        found = _trace(source, request, adapter)
        write_trace(path, found)
    return found


def _trace(source: ModelSource, request: TraceRequest, adapter: int) -> Trace:
    return trace_made(
        lambda: make_model(sizes_of(source.config), request, adapter=adapter),
        _batch,
        request,
        name=f"LitGPT's {source.name}",
        attention="sdpa",
    )


def _batch(_: Any, samples: int, request: TraceRequest) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    tokens, labels = (torch.zeros((samples, request.sequence_length), dtype=torch.int64) for _ in range(2))
    return (tokens, labels), {}


def make_model(sizes: Sizes, request: TraceRequest, *, adapter: int) -> Any:
    """Return the model in bf16, in training mode, with what trains alone requiring gradients."""
    import torch

    rank = request.lora.rank if request.lora else 0
    with replaceable_parameters():
        model = _classes().Model(sizes, rank=rank, adapter=adapter).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = _trains(name, adapter)
    if request.quantization is not None:
        for name, module in [*model.named_modules()]:
            if type(module) is torch.nn.Linear:
                model.set_submodule(name, packed_like(module, request.packing))
    return model.train()


def _trains(name: str, adapter: int) -> bool:
    if adapter == 0:
        return "lora_" in name
    return "adapter_" in name or (adapter == 2 and "norm" in name)


@cache
def _classes() -> Any:
    """Return a namespace of the modules' classes, for which torch has to be there."""
    from types import SimpleNamespace

    import torch
    from torch import nn
    from torch.nn import functional

    class RmsNorm(nn.Module):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Any) -> Any:
            wide = x.float()
            normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
            return (self.weight * normed).to(dtype=x.dtype)

    class ScaledLinear(nn.Module):  # type: ignore[misc]
        """A linear layer with the scale and the bias that adapters of version 2 learn."""

        def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(inputs, outputs, bias=bias)
            self.adapter_bias = nn.Parameter(torch.zeros(outputs))
            self.adapter_scale = nn.Parameter(torch.ones(outputs))

        def forward(self, x: Any) -> Any:
            return self.adapter_scale * (self.linear(x) + self.adapter_bias)

    class LoraQkv(nn.Module):  # type: ignore[misc]
        """The product for query, key and value, with LoRA on query and value."""

        def __init__(self, sizes: Sizes, rank: int) -> None:
            super().__init__()
            value_width = sizes.num_groups * sizes.head_width
            self.sizes, self.scale = sizes, _LORA_ALPHA / rank
            self.widths = (sizes.width, value_width)
            self.places = [*range(sizes.width), *range(sizes.width + value_width, sizes.qkv_width)]
            self.linear = nn.Linear(sizes.width, sizes.qkv_width, bias=sizes.has_bias)
            self.dropout = nn.Dropout(_LORA_DROPOUT)
            self.lora_a = nn.Parameter(torch.zeros(2 * rank, sizes.width))
            self.lora_b = nn.Parameter(torch.zeros(sum(self.widths), rank))

        def forward(self, x: Any) -> Any:
            product = self.linear(x)
            inner = functional.linear(self.dropout(x), self.lora_a).transpose(-2, -1)
            outer = self._grouped(inner, self.lora_b.unsqueeze(-1)).transpose(-2, -1)
            return product + self._padded(outer) * self.scale

        def _grouped(self, inner: Any, weight: Any) -> Any:
            if self.sizes.num_groups == self.sizes.num_heads:
                return functional.conv1d(inner, weight, groups=2)
            parts = zip(inner.chunk(2, dim=1), weight.split(self.widths), strict=True)
            return torch.cat([functional.conv1d(part, own) for part, own in parts], dim=1)

        def _padded(self, update: Any) -> Any:
            turned = update.transpose(0, 1)
            shape = (*turned.shape[:-1], self.sizes.qkv_width)
            whole = turned.new_zeros(shape).view(-1, self.sizes.qkv_width)
            places = torch.tensor(self.places, device=whole.device)
            whole = whole.index_copy(1, places, turned.reshape(-1, sum(self.widths)))
            return whole.view(shape).transpose(0, 1)

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self, sizes: Sizes, layer: int, *, rank: int, adapter: int) -> None:
            super().__init__()
            linear = ScaledLinear if adapter == 2 else nn.Linear
            self.sizes = sizes
            self.attn = (
                LoraQkv(sizes, rank) if rank else linear(sizes.width, sizes.qkv_width, bias=sizes.has_bias)
            )
            self.proj = linear(sizes.width, sizes.width, bias=sizes.has_bias)
            self.has_prompt = adapter > 0 and layer >= _FIRST_ADAPTED
            if self.has_prompt:
                self.adapter_prompt = nn.Embedding(_PROMPT_LENGTH, sizes.width)
                self.adapter_gate = nn.Parameter(torch.zeros(1, 1, sizes.num_heads, 1))

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            samples, tokens, width = x.shape
            query, key, value = self._heads(self.attn(x), samples, tokens)
            rotated = self.sizes.rotary_width
            query, key = (
                torch.cat((_rotate(one[..., :rotated], cos, sin), one[..., rotated:]), dim=-1)
                for one in (query, key)
            )
            mixed = self._attend(query, key, value, None)
            if self.has_prompt:
                mixed = mixed + self.adapter_gate * self._attend_to_prompt(query)
            return self.proj(mixed.reshape(samples, tokens, width))

        def _heads(self, product: Any, samples: int, tokens: int) -> tuple[Any, Any, Any]:
            groups, width = self.sizes.num_groups, self.sizes.head_width
            shared = self.sizes.num_heads // groups
            parts = product.view(samples, tokens, groups, shared + 2, width).permute(0, 2, 3, 1, 4)
            query, key, value = parts.split((shared, 1, 1), dim=2)
            shape = (samples, groups, shared, tokens, width)
            if groups != 1:
                key, value = key.expand(shape), value.expand(shape)
            return (
                query.reshape(samples, -1, tokens, width),
                key.reshape(samples, -1, tokens, width),
                value.reshape(samples, -1, tokens, width),
            )

        def _attend_to_prompt(self, query: Any) -> Any:
            prompt = self.adapter_prompt.weight.reshape(1, _PROMPT_LENGTH, self.sizes.width)
            _, key, value = self._heads(self.attn(prompt), 1, _PROMPT_LENGTH)
            mask = torch.ones(query.shape[2], _PROMPT_LENGTH, dtype=torch.bool, device=query.device)
            return self._attend(query, key, value, mask)

        def _attend(self, query: Any, key: Any, value: Any, mask: Any) -> Any:
            mixed = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None
            )
            return mixed.transpose(1, 2)

    class Mlp(nn.Module):  # type: ignore[misc]
        def __init__(self, sizes: Sizes, linear: Any) -> None:
            super().__init__()
            self.sizes = sizes
            self.fc_1 = linear(sizes.width, sizes.mlp_width, bias=sizes.has_bias)
            if sizes.is_llama:
                self.fc_2 = linear(sizes.width, sizes.mlp_width, bias=sizes.has_bias)
            self.proj = linear(sizes.mlp_width, sizes.width, bias=sizes.has_bias)

        def forward(self, x: Any) -> Any:
            inner = self.fc_1(x)
            if self.sizes.is_llama:
                gate = self.fc_2(x)
                inner = functional.silu(inner) * gate
            else:
                inner = functional.gelu(inner, approximate=self.sizes.gelu)
            return self.proj(inner)

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, sizes: Sizes, layer: int, *, rank: int, adapter: int) -> None:
            super().__init__()
            norm = RmsNorm if sizes.is_llama else nn.LayerNorm
            self.sizes = sizes
            self.norm_1 = norm(sizes.width)
            self.attn = Attention(sizes, layer, rank=rank, adapter=adapter)
            if not sizes.shares_norm:
                self.norm_2 = norm(sizes.width)
            self.mlp = Mlp(sizes, ScaledLinear if adapter == 2 else nn.Linear)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            first = self.norm_1(x)
            mixed = self.attn(first, cos, sin)
            if self.sizes.is_parallel:
                second = first if self.sizes.shares_norm else self.norm_2(x)
                return self.mlp(second) + mixed + x
            x = mixed + x
            return self.mlp(self.norm_2(x)) + x

    class Model(nn.Module):  # type: ignore[misc]
        """Returns the loss, and the logits that the loop holds."""

        def __init__(self, sizes: Sizes, *, rank: int, adapter: int) -> None:
            super().__init__()
            linear = ScaledLinear if adapter == 2 else nn.Linear
            self.sizes = sizes
            self.lm_head = linear(sizes.width, sizes.vocabulary, bias=sizes.has_head_bias)
            self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
            self.blocks = nn.ModuleList(
                Block(sizes, layer, rank=rank, adapter=adapter) for layer in range(sizes.num_layers)
            )
            self.last_norm = (RmsNorm if sizes.is_llama else nn.LayerNorm)(sizes.width)

        def forward(self, tokens: Any, labels: Any) -> dict[str, Any]:
            cos, sin = (torch.ones(tokens.shape[1], self.sizes.rotary_width) for _ in range(2))
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, cos, sin)
            x = self.last_norm(x)
            logits = [self.lm_head(chunk) for chunk in x.split(_HEAD_CHUNK, dim=1)]
            logits = [chunk.float() for chunk in logits]  # Fabric hands outputs on in fp32
            logits[-1] = logits[-1][..., :-1, :]
            return {"loss": _loss(logits, labels[..., 1:]), "logits": logits}

    def _rotate(x: Any, cos: Any, sin: Any) -> Any:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return ((x * cos) + (turned * sin)).to(dtype=x.dtype)

    def _loss(logits: list[Any], labels: Any) -> Any:
        losses = [
            functional.cross_entropy(
                chunk.reshape(-1, chunk.shape[-1]), part.reshape(-1), ignore_index=-1, reduction="none"
            )
            for chunk, part in zip(logits, labels.split(_HEAD_CHUNK, dim=1), strict=True)
        ]
        return torch.cat(losses).mean()

    return SimpleNamespace(Model=Model)
