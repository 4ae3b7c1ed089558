"""The shape that closed forms know of a transformer: its matrices by layer, and how wide what it keeps is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from zerofit.core.freezing import frozen_names
from zerofit.core.strategy import Precision

if TYPE_CHECKING:
    from zerofit.core.allocation_log import TraceRequest
    from zerofit.core.facts import ModelFacts

_LORA_TARGETS = ("query", "value")
"""The projections that peft adapts in most families where nothing else is said.
Source: peft/utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING (0.18)."""
_ALL_LINEAR = ("all-linear",)
"""peft's word for every linear layer but the head, which a quantized base takes where nothing is said."""
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
"""The matrices that families call so; of another name nothing is known, and nothing counted."""
_RMS_NORM_FAMILIES = frozenset({"t5", "mt5", "longt5", "umt5"})
"""Families with RMS norms though their feed-forward blocks have no gate."""
_GELU_NEW_FAMILIES = frozenset({"gpt2", "gpt_neo", "codegen", "gptj", "gpt_bigcode"})
"""Families whose activation is written out in Python, so that each of its steps keeps a tensor.
Source: transformers/activations.py, NewGELUActivation (5.23)."""
_FUSED_QUERY_FAMILIES = frozenset({"gpt2", "gpt_bigcode", "gpt_neox", "codegen", "bloom", "falcon", "phi3"})
"""Families that make query, key and value with one matrix product, so that autocast casts its input once."""
_HEAD_NORM_FAMILIES = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2"})
"""Families with RMS norms of query and key."""
_VOCABULARY_HEADS = ("ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One weight matrix of a layer and all parameters that go with it."""

    name: str
    """Of its module within the layer, such as "attention.query"."""
    rows: int
    """Inputs."""
    columns: int
    """Outputs."""
    num_elements: int
    """Of the parameter: all experts' together in a mixture."""
    num_experts: int = 1
    """Matrices of this size in the parameter: experts of a mixture."""
    uses: int = 1
    """How often each token goes through: experts a token in a mixture."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model under a trace request."""

    facts: ModelFacts
    request: TraceRequest

    @cached_property
    def compute_bytes(self) -> int:
        """Bytes of a number in matrix products."""
        request = self.request
        return 4 if (request.autocast or request.weights) is Precision.FP32 else 2

    @cached_property
    def stream_bytes(self) -> int:
        """Bytes of a number in the residual stream: fp32 under autocast, as sums stay in the wider format."""
        return 4 if self.request.weights is Precision.FP32 else 2

    @cached_property
    def precision(self) -> Precision:
        """Number format of matrix products."""
        return self.request.autocast or self.request.weights

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of a weight as it lies on the GPU."""
        return 4 if self.request.weights is Precision.FP32 else 2

    @cached_property
    def whole(self) -> Shape:
        """The shape of whole layers, of which ranks may hold parts."""
        return replace(self, request=replace(self.request, tensor_parallel_size=1))

    def _part(self, size: int) -> int:
        """Return the part of a layer's width that one of the ranks that share it has."""
        return -(-size // self.request.tensor_parallel_size)

    @cached_property
    def query_width(self) -> int:
        """Outputs of the query projection, on one of the ranks that share it."""
        facts = self.facts
        return self._part(facts.num_attention_heads * facts.head_dim or facts.hidden_size)

    @cached_property
    def key_width(self) -> int:
        """Outputs of the key projection, and of the value projection, on one of the ranks that share it."""
        return self._part(self.facts.num_key_value_heads * self.facts.head_dim) or self.query_width

    @cached_property
    def inner_width(self) -> int:
        """Width inside the feed-forward block, on one of the ranks that share it."""
        return self._part(self.facts.intermediate_size or 4 * self.facts.hidden_size)

    @cached_property
    def has_rms_norm(self) -> bool:
        """True if norms are RMS norms written out in Python, in fp32."""
        return self.facts.is_gated or self.facts.model_type in _RMS_NORM_FAMILIES

    @cached_property
    def has_dropout(self) -> bool:
        """True if hidden states go through dropout. ASSUMPTION: families with a gate have none."""
        return not self.facts.is_gated

    @cached_property
    def inner_bytes(self) -> int:
        """Bytes that a feed-forward block keeps for each token and each number of inner_width."""
        width = self.compute_bytes
        if self.facts.is_gated:
            return 4 * width  # gate, its activation, up, and their product
        if self.facts.model_type not in _GELU_NEW_FAMILIES:
            return 2 * width
        # Its input, half of it, tanh, tanh + 1 and the product; autocast takes pow and what follows to fp32.
        return 16 if self.is_cast else 5 * width

    @cached_property
    def is_cast(self) -> bool:
        """True if autocast casts what enters a matrix product, for each product anew."""
        return self.compute_bytes < self.weight_bytes

    @cached_property
    def has_head_norms(self) -> bool:
        """True if query and key are normed."""
        return self.facts.model_type in _HEAD_NORM_FAMILIES

    @cached_property
    def query_casts(self) -> int:
        """How many copies of its input the products of query, key and value keep under autocast."""
        return 1 if self.facts.model_type in _FUSED_QUERY_FAMILIES else 3

    @cached_property
    def logits_width(self) -> int:
        """Columns of the logits; 0 for a head without vocabulary."""
        facts = self.facts
        has_them = facts.is_causal or any(part in facts.architecture for part in _VOCABULARY_HEADS)
        is_other = facts.architecture.endswith(("Classification", "QuestionAnswering", "MultipleChoice"))
        return facts.vocab_size if has_them and not is_other else 0

    @cached_property
    def loss_bytes(self) -> int:
        """Bytes of a number in the loss: fp32 in decoders and under autocast, else as the logits are.

        Source: transformers/loss/loss_utils.py, ForCausalLMLoss and ForMaskedLMLoss (5.23).
        """
        is_wide = self.facts.is_causal or self.request.autocast is not None
        return 4 if is_wide else self.compute_bytes

    def trains(self, name: str) -> bool:
        """Return True if a parameter of this name trains, which is no adapter's."""
        request = self.request
        return request.lora is None and not frozen_names((name,), request.freeze, base_prefix="model")

    @cached_property
    def trains_layers(self) -> bool:
        """True if the matrices of the last layer train; the first ones may be frozen all the same."""
        return self.trains(f"model.layers.{max(1, self.facts.num_layers) - 1}.mlp.up.weight")

    def is_checkpointed(self, layer: int) -> bool:
        """Return True if a layer recomputes; a decoder's are counted on from the encoder's."""
        return self.request.gradient_checkpointing and layer % self.request.checkpoint_every == 0

    def recomputed_share(self, layer: int) -> float:
        """Return which part of the layers of a layer's kind, encoder's or decoder's, recompute."""
        kind = [one for one in range(self.facts.num_layers) if self.is_decoder(one) == self.is_decoder(layer)]
        return sum(map(self.is_checkpointed, kind)) / len(kind)

    def is_decoder(self, layer: int) -> bool:
        """Return True if a layer attends to an encoder as well."""
        return layer >= self.facts.num_layers - self.facts.num_decoder_layers

    def tokens(self, layer: int) -> int:
        """Return the tokens of a sample in a layer, on one of the ranks that share them."""
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
        attentions = ("attention", "cross_attention") if self.is_decoder(layer) else ("attention",)
        found = [
            _matrix(f"{attention}.{name}", rows, columns)
            for attention in attentions
            for name, rows, columns in (
                ("query", hidden, query),
                ("key", hidden, key),
                ("value", hidden, key),
                ("output", query, hidden),
            )
        ]
        experts, uses = max(1, self.facts.num_experts), max(1, self.facts.num_experts_per_token)
        if experts > 1:
            found.append(_matrix("mlp.router", hidden, experts))
        gate = ("gate",) if self.facts.is_gated else ()
        for name in (*gate, "up"):
            found.append(_matrix(f"mlp.{name}", hidden, self.inner_width, experts=experts, uses=uses))
        found.append(_matrix("mlp.down", self.inner_width, hidden, experts=experts, uses=uses))
        return tuple(found)

    def layer_rest(self, layer: int) -> int:
        """Return the elements of a layer's norms and biases, which are whole: what is left of its count."""
        if self.request.tensor_parallel_size > 1:
            return self.whole.layer_rest(layer)
        matrices = sum(matrix.num_elements for matrix in self.matrices(layer))
        known = self.facts.num_largest_layer_parameters
        is_largest = self.is_decoder(layer) or not self.facts.num_decoder_layers
        rest = known - matrices if known and is_largest else 0
        return rest if rest > 0 else 2 * self.facts.hidden_size

    @cached_property
    def outside_elements(self) -> int:
        """Elements outside of all layers, whole: embeddings, final norm, head; at least 0."""
        if self.request.tensor_parallel_size > 1:
            return self.whole.outside_elements
        inside = sum(
            self.layer_rest(layer) + sum(matrix.num_elements for matrix in self.matrices(layer))
            for layer in range(self.facts.num_layers)
        )
        return max(0, self.facts.num_parameters - inside)

    @cached_property
    def embedding_elements(self) -> int:
        """Elements of the embeddings, positions and all else that is neither in a layer nor in the head."""
        return self.outside_elements - self.whole.head_elements

    @cached_property
    def head_elements(self) -> int:
        """Elements of a head's own matrix; 0 where it is tied to the embedding, or small."""
        table = self.facts.vocab_size * self.facts.hidden_size
        is_untied = bool(self.logits_width) and self.outside_elements >= 2 * table
        return self._part(table) if is_untied else 0

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Names of the matrices that get a LoRA adapter."""
        lora = self.request.lora
        if lora is None:
            return frozenset()
        names = lora.target_modules or (() if self.request.quantization is None else _ALL_LINEAR)
        if names == _ALL_LINEAR:
            return frozenset(name for names in _MATRICES.values() for name in names)
        return frozenset(one for name in names or _LORA_TARGETS for one in _MATRICES.get(name, ()))

    @cached_property
    def packed_elements(self) -> int:
        """Elements of the largest matrix that rests in 4 bits; 0 without any."""
        if self.request.quantization is None:
            return 0
        return max(matrix.rows * matrix.columns for matrix in self.matrices(self.facts.num_layers - 1))

    def bytes_at_rest(self, num_elements: int) -> int:
        """Return the bytes of a matrix in 4 bits, with its scales (zerofit/models/trace/packed.py)."""
        return num_elements // 2 + num_elements // 64 + num_elements // 4096


def _matrix(name: str, rows: int, columns: int, *, experts: int = 1, uses: int = 1) -> Matrix:
    elements = rows * columns * experts
    return Matrix(
        name=name, rows=rows, columns=columns, num_elements=elements, num_experts=experts, uses=uses
    )
