"""Shape: the dimensions of a transformer that closed forms use, and its matrices by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import FusedKernel
from zerofit.core.freezing import frozen_names
from zerofit.core.strategy import Precision

if TYPE_CHECKING:
    from zerofit.core.allocation_log import TraceRequest
    from zerofit.core.facts import ModelFacts

_LORA_TARGETS = ("query", "value")
"""peft's default targets in most families.
Source: peft/utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING (0.18)."""
_ALL_LINEAR = ("all-linear",)
"""peft's name for every linear layer but the head: zerofit's default for a quantized base."""
_MATRICES = {
    **dict.fromkeys(("query", "q_proj", "q_lin", "q", "wq"), ("attention.query",)),
    **dict.fromkeys(("key", "k_proj", "k_lin", "k", "wk"), ("attention.key",)),
    **dict.fromkeys(("value", "v_proj", "v_lin", "v", "wv"), ("attention.value",)),
    **dict.fromkeys(("o_proj", "out_proj", "out_lin", "o"), ("attention.output",)),
    **dict.fromkeys(
        ("c_attn", "query_key_value", "qkv_proj"), ("attention.query", "attention.key", "attention.value")
    ),
    **dict.fromkeys(("gate_proj", "wi_0"), ("mlp.gate",)),
    **dict.fromkeys(("up_proj", "fc1", "c_fc", "wi", "wi_1"), ("mlp.up",)),
    **dict.fromkeys(("down_proj", "fc2", "wo"), ("mlp.down",)),
}
"""The matrices by their names in the model families; other names count nothing."""
_RMS_NORM_FAMILIES = frozenset({"t5", "mt5", "longt5", "umt5"})
"""Families with RMS norms though their feed-forward blocks have no gate."""
_GELU_NEW_FAMILIES = frozenset({"gpt2", "gpt_neo", "codegen", "gptj", "gpt_bigcode"})
"""Families whose activation is written in Python, so that each of its operators saves a tensor.
Source: transformers/activations.py, NewGELUActivation (5.23)."""
_FUSED_QUERY_FAMILIES = frozenset({"gpt2", "gpt_bigcode", "gpt_neox", "codegen", "bloom", "falcon", "phi3"})
"""Families with one matrix product for query, key and value, so that autocast casts its input once."""
_HEAD_NORM_FAMILIES = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2"})
"""Families with RMS norms of query and key."""
_VOCABULARY_HEADS = ("ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One weight matrix of a layer; in a mixture of experts, those of all experts."""

    name: str
    """Of its module within the layer, such as "attention.query"."""
    rows: int
    """Inputs."""
    columns: int
    """Outputs."""
    num_experts: int = 1
    """Matrices of this size in the parameter."""
    uses: int = 1
    """Experts per token."""

    @property
    def num_elements(self) -> int:
        """Elements of the parameter, with all experts."""
        return self.rows * self.columns * self.num_experts


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's dimensions under a trace request."""

    facts: ModelFacts
    request: TraceRequest

    @cached_property
    def compute_bytes(self) -> int:
        """Bytes per element in matrix products."""
        return 4 if self.precision is Precision.FP32 else 2

    @cached_property
    def precision(self) -> Precision:
        """Number format of matrix products."""
        return self.request.autocast or self.request.weights

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes per element of the weights on the GPU, and of the residual stream, also under autocast."""
        return 4 if self.request.weights is Precision.FP32 else 2

    @cached_property
    def whole(self) -> Shape:
        """The shape without tensor parallelism."""
        return replace(self, request=replace(self.request, tensor_parallel_size=1))

    def _part(self, size: int) -> int:
        """Return one rank's part of a layer's width under tensor parallelism."""
        return -(-size // self.request.tensor_parallel_size)

    @cached_property
    def query_width(self) -> int:
        """Outputs of the query projection on one rank."""
        facts = self.facts
        return self._part(facts.num_attention_heads * facts.head_dim or facts.hidden_size)

    @cached_property
    def key_width(self) -> int:
        """Outputs of the key projection, and of the value projection, on one rank."""
        return self._part(self.facts.num_key_value_heads * self.facts.head_dim) or self.query_width

    @cached_property
    def inner_width(self) -> int:
        """Width inside the feed-forward block on one rank."""
        return self._part(self.facts.intermediate_size or 4 * self.facts.hidden_size)

    @cached_property
    def has_rms_norm(self) -> bool:
        """True if norms are RMS norms written in Python, in fp32."""
        return self.facts.is_gated or self.facts.model_type in _RMS_NORM_FAMILIES

    @cached_property
    def has_dropout(self) -> bool:
        """True if hidden states go through dropout. ASSUMPTION: families with a gate have none."""
        return not self.facts.is_gated

    @cached_property
    def inner_bytes(self) -> int:
        """Bytes that a feed-forward block saves per token and element of inner_width."""
        width = self.compute_bytes
        if self.facts.is_gated:
            return 4 * width  # gate, its activation, up, and their product
        if self.facts.model_type not in _GELU_NEW_FAMILIES:
            return 2 * width
        # Its input, half of it, tanh, tanh + 1 and the product; autocast takes pow and what follows to fp32.
        return 16 if self.is_cast else 5 * width

    @cached_property
    def is_cast(self) -> bool:
        """True if autocast casts the inputs of matrix products."""
        return self.compute_bytes < self.weight_bytes

    @cached_property
    def has_head_norms(self) -> bool:
        """True if query and key are normalized."""
        return self.facts.model_type in _HEAD_NORM_FAMILIES

    @cached_property
    def query_casts(self) -> int:
        """Copies of the input that the products of query, key and value save under autocast."""
        return 1 if self.facts.model_type in _FUSED_QUERY_FAMILIES else 3

    @cached_property
    def logits_width(self) -> int:
        """Columns of the logits; 0 for a head that is not of a language model."""
        facts = self.facts
        has_them = facts.is_causal or any(part in facts.architecture for part in _VOCABULARY_HEADS)
        is_other = facts.architecture.endswith(("Classification", "QuestionAnswering", "MultipleChoice"))
        return facts.vocab_size if has_them and not is_other else 0

    @cached_property
    def logits_at_once(self) -> int:
        """Logits of a token that exist at the same time; in pieces as many as the hidden state is wide."""
        is_fused = FusedKernel.FUSED_LINEAR_CROSS_ENTROPY in self.request.kernels
        return min(self.logits_width, self.facts.hidden_size) if is_fused else self.logits_width

    @cached_property
    def loss_bytes(self) -> int:
        """Bytes per element in the loss: fp32 in decoders and under autocast, else as in the logits.

        Source: transformers/loss/loss_utils.py, ForCausalLMLoss and ForMaskedLMLoss (5.23).
        """
        is_wide = self.facts.is_causal or self.request.autocast is not None
        return 4 if is_wide else self.compute_bytes

    def trains(self, name: str) -> bool:
        """Return True if a parameter of this name trains; not for adapters' parameters."""
        request = self.request
        return request.lora is None and not frozen_names((name,), request.freeze, base_prefix="model")

    @cached_property
    def trains_layers(self) -> bool:
        """True if the matrices of the last layer train; earlier layers may be frozen all the same."""
        return self.trains(f"model.layers.{max(1, self.facts.num_layers) - 1}.mlp.up.weight")

    def is_checkpointed(self, layer: int) -> bool:
        """Return True if a layer is recomputed; the decoder's layers are numbered after the encoder's."""
        return self.request.gradient_checkpointing and layer % self.request.checkpoint_every == 0

    def stream_bytes(self, layer: int) -> int:
        """Return the bytes per sample of the residual stream."""
        return self.tokens(layer) * self.facts.hidden_size * self.weight_bytes

    def recomputed_share(self, layer: int) -> float:
        """Return the recomputed fraction of the layers of a layer's kind, encoder or decoder."""
        kind = [
            number
            for number in range(self.facts.num_layers)
            if self.is_decoder(number) == self.is_decoder(layer)
        ]
        return sum(map(self.is_checkpointed, kind)) / len(kind)

    def is_decoder(self, layer: int) -> bool:
        """Return True if a layer attends to an encoder too."""
        return layer >= self.facts.num_layers - self.facts.num_decoder_layers

    def num_attentions(self, layer: int) -> int:
        """Return the attentions of a layer: a decoder's beside an encoder has cross-attention too."""
        return 2 if self.is_decoder(layer) else 1

    @cached_property
    def experts_per_token(self) -> int:
        """Feed-forward blocks that each token passes through in a layer."""
        return max(1, self.facts.num_experts_per_token)

    def tokens(self, layer: int) -> int:
        """Return one rank's tokens of a sample in a layer."""
        return -(-self.whole_tokens(layer) // self.request.sequence_parallel_size)

    def whole_tokens(self, layer: int) -> int:
        """Return the tokens of a whole sample in a layer."""
        request = self.request
        if self.is_decoder(layer):
            return request.target_length or request.sequence_length
        return self.facts.source_positions or request.sequence_length

    def matrices(self, layer: int) -> tuple[Matrix, ...]:
        """Return the matrices of a layer, in the order of their use."""
        hidden, query, key = self.facts.hidden_size, self.query_width, self.key_width
        attentions = ("attention", "cross_attention")[: self.num_attentions(layer)]
        found = [
            Matrix(name=f"{attention}.{name}", rows=rows, columns=columns)
            for attention in attentions
            for name, rows, columns in (
                ("query", hidden, query),
                ("key", hidden, key),
                ("value", hidden, key),
                ("output", query, hidden),
            )
        ]
        experts = max(1, self.facts.num_experts)
        if experts > 1:
            found.append(Matrix(name="mlp.router", rows=hidden, columns=experts))
        gate = ("gate",) if self.facts.is_gated else ()
        for name in (*gate, "up", "down"):
            rows, columns = (self.inner_width, hidden) if name == "down" else (hidden, self.inner_width)
            uses = self.experts_per_token
            found.append(
                Matrix(name=f"mlp.{name}", rows=rows, columns=columns, num_experts=experts, uses=uses)
            )
        return tuple(found)

    def layer_rest(self, layer: int) -> int:
        """Return the elements of a layer's norms and biases, whole on each rank: the rest of its count."""
        if self.request.tensor_parallel_size > 1:
            return self.whole.layer_rest(layer)
        matrices = sum(matrix.num_elements for matrix in self.matrices(layer))
        known = self.facts.num_largest_layer_parameters
        is_largest = self.is_decoder(layer) or not self.facts.num_decoder_layers
        rest = known - matrices if known and is_largest else 0
        return rest if rest > 0 else 2 * self.facts.hidden_size

    @cached_property
    def outside_elements(self) -> int:
        """Elements outside all layers, whole: embeddings, final norm, head."""
        if self.request.tensor_parallel_size > 1:
            return self.whole.outside_elements
        inside = sum(
            self.layer_rest(layer) + sum(matrix.num_elements for matrix in self.matrices(layer))
            for layer in range(self.facts.num_layers)
        )
        return max(0, self.facts.num_parameters - inside)

    @cached_property
    def embedding_elements(self) -> int:
        """Elements of embeddings, positions and all else outside layers and head."""
        return self.outside_elements - self.whole.head_elements

    @cached_property
    def head_elements(self) -> int:
        """Elements of the head's own matrix; 0 if it is tied to the embedding, or small."""
        table = self.facts.vocab_size * self.facts.hidden_size
        is_untied = bool(self.logits_width) and self.outside_elements >= 2 * table
        return self._part(table) if is_untied else 0

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Names of the matrices with a LoRA adapter."""
        lora = self.request.lora
        if lora is None:
            return frozenset()
        names = lora.target_modules or (() if self.request.quantization is None else _ALL_LINEAR)
        if names == _ALL_LINEAR:
            return frozenset(name for names in _MATRICES.values() for name in names)
        return frozenset(matrix for name in names or _LORA_TARGETS for matrix in _MATRICES.get(name, ()))

    @cached_property
    def packed_elements(self) -> int:
        """Elements of the largest matrix that is stored packed; 0 without quantization."""
        if self.request.quantization is None and not self.request.base_bits:
            return 0
        return max(matrix.rows * matrix.columns for matrix in self.matrices(self.facts.num_layers - 1))

    def packed_bytes(self, num_elements: int) -> int:
        """Return the bytes of a packed matrix with its scales (zerofit/models/trace/packed.py for nf4)."""
        if self.request.quantization is None:
            return int(num_elements * self.request.base_bits / 8)
        return num_elements // 2 + num_elements // 64 + num_elements // 4096
