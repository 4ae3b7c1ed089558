"""An AllocationLog from a model's dimensions for `plan --fast`: closed forms of activations and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.allocation_log import (
    COLLECTIVES,
    EXPERT_ROWS,
    AllocationLog,
    CostKind,
    Event,
    OperatorCost,
    Pass,
    Storages,
    TensorKind,
    TracedParameter,
)
from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.planning.estimate.closed_form.shape import Shape

if TYPE_CHECKING:
    from zerofit.core.allocation_log import TraceRequest
    from zerofit.core.facts import ModelFacts

_ATTENTION_BACKWARD = 2.5
"""The backward kernel computes five matrix products, the forward kernel two.
Source: https://arxiv.org/abs/2307.08691 (section 2.3)."""
_LAYER_OPERATORS, _RMS_LAYER_OPERATORS, _CASTS = 11, 30, 16
"""Memory-bound operators of one layer's forward pass, with fused norms, and with RMS norms and rotary
embeddings written in Python; and autocast's casts of weights, biases and inputs. Counted in traces of BERT
and Llama (transformers 5.23)."""
_BACKWARD_OPERATORS, _BACKWARD_BYTES = 1.5, 1.4
"""Memory-bound operators of the backward pass per operator of the forward pass, in the same traces; and the
bytes of each, relative to a forward one."""
_ROTARY_PASSES = 8
"""Tensors read or written to rotate query or key. ASSUMPTION."""
_SCORE_PASSES = 6
"""Pointwise operators on the scores: scale, mask, softmax with its casts, dropout. ASSUMPTION."""
_LOSS_PASSES = 6
"""Tensors as large as the fp32 logits that the loss reads or writes in each pass. ASSUMPTION."""


def closed_form_costs(shape: Shape) -> tuple[OperatorCost, ...]:
    """Return the costs of one micro-batch: per matrix element and token, 2 FLOPs forward and 4 backward."""
    costs = []
    for layer, count in _kinds_of_layers(shape):
        costs += _of_layer(shape, layer, count)
        if shape.request.activation_offload:
            costs += _of_copies(shape, layer, round(count * shape.recomputed_share(layer)))
    if shape.logits_width:
        costs += _of_head(shape)
    return tuple(costs)


def _kinds_of_layers(shape: Shape) -> list[tuple[int, int]]:
    """Return (a layer, number of such layers) for encoder and decoder."""
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
            CostKind.GROUPED if matrix.num_experts > 1 else CostKind.MATMUL,
            count,
            flops=flops,
            fixed_flops=2 * EXPERT_ROWS * matrix.num_elements if matrix.num_experts > 1 else 0,
            moved=moved,
            fixed=fixed,
            backward_calls=2,
            # Recomputation stops at the last saved tensor, before this product.
            recomputed=shape.recomputed_share(layer) if matrix.name != "mlp.down" else 0.0,
        )
    attentions = count * shape.num_attentions(layer)
    costs += _of_eager_attention(shape, layer, attentions) or _of_fused_attention(shape, layer, attentions)
    costs += _of_exchange(shape, layer, attentions)
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
    """Return the costs of the flash or memory-efficient kernel, which skips what a causal mask masks."""
    tokens, width = shape.tokens(layer), shape.compute_bytes
    is_halved = shape.facts.is_causal and not shape.request.is_padded
    flops = 4 * tokens * shape.whole_tokens(layer) * shape.query_width // (2 if is_halved else 1)
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


def _of_exchange(shape: Shape, layer: int, count: int) -> list[OperatorCost]:
    """Return the collectives of a layer.

    Sequence parallelism: all-to-all of queries, keys, values and outputs. Tensor parallelism: all-reduce of
    outputs, and of the input gradients of column-parallel matrices.
    """
    request, width = shape.request, shape.tokens(layer) * shape.compute_bytes
    found: list[tuple[str, int, int, float]] = []
    if request.sequence_parallel_size > 1:
        found += [
            ("all_to_all", width * size, 2 * count, 1.0) for size in (shape.query_width, shape.key_width)
        ]
    if request.tensor_parallel_size > 1:
        inputs = 3 * count + 1 + shape.facts.is_gated
        sums = count + 1
        found.append(("all_reduce", width * shape.facts.hidden_size, sums, inputs / sums))
    return [
        cost
        for name, moved, times, backward in found
        for cost in _passes(
            shape,
            f"{COLLECTIVES}.{name}.default",
            CostKind.EXCHANGE,
            times,
            recomputed=shape.recomputed_share(layer),
            moved=moved,
            backward_calls=backward,
        )
    ]


def _of_copies(shape: Shape, layer: int, count: int) -> list[OperatorCost]:
    """Return the copies of checkpointed layers' inputs to the host, and back."""
    return _passes(shape, "host copy", CostKind.HOST_COPY, count, moved=shape.stream_bytes(layer))


def _of_eager_attention(shape: Shape, layer: int, count: int) -> list[OperatorCost]:
    """Return the costs of eager attention: two products, and the operators on the scores between them."""
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
    """Return the bytes per sample that the pointwise operators of one layer's forward pass move."""
    facts, width, stream = shape.facts, shape.compute_bytes, shape.weight_bytes
    uses = shape.experts_per_token
    norm = (2 * stream + 24 + 3 * width) if shape.has_rms_norm else (stream + 2 * width)
    sums = 3 * stream + (3 * width + 1 if shape.has_dropout else 0)
    rotary = _ROTARY_PASSES * width * (shape.query_width + shape.key_width) if shape.has_rms_norm else 0
    activation = (width + shape.inner_bytes) * shape.inner_width * uses
    # Experts' tokens are gathered, weighted and sorted, each a read and a write, and read to be summed.
    routing = 7 * uses * width * facts.hidden_size if facts.num_experts > 1 else 0
    return shape.tokens(layer) * (2 * (norm + sums) * facts.hidden_size + rotary + activation + routing)


def _of_head(shape: Shape) -> list[OperatorCost]:
    tokens = shape.tokens(shape.facts.num_layers - 1)
    hidden, columns, width = shape.facts.hidden_size, shape.logits_width, shape.compute_bytes
    parts = shape.request.tensor_parallel_size if shape.head_elements else 1  # a tied head is not split
    gathers = (
        _passes(
            shape,
            f"{COLLECTIVES}.all_gather_into.default",
            CostKind.EXCHANGE,
            1,
            moved=width * tokens * columns // parts,
            backward_moved=0,
        )
        if parts > 1
        else []
    )
    matmul = _passes(
        shape,
        "head",
        CostKind.MATMUL,
        1,
        flops=2 * tokens * hidden * columns // parts,
        moved=width * tokens * (hidden + columns // parts),
        fixed=width * hidden * columns // parts,
        backward_calls=2,
    )
    loss = _passes(
        shape,
        "loss",
        CostKind.MEMORY,
        _LOSS_PASSES,
        moved=4 * tokens * columns,
        backward_moved=4 * tokens * columns,
    )
    return [*matmul, *gathers, *loss]


def _passes(
    shape: Shape,
    operator: str,
    kind: CostKind,
    count: int,
    *,
    flops: int = 0,
    fixed_flops: int = 0,
    moved: int = 0,
    fixed: int = 0,
    backward_calls: float = 1,
    backward_flops: int | None = None,
    backward_moved: int | None = None,
    recomputed: float = 0.0,
) -> list[OperatorCost]:
    """Return one operator's costs in the forward pass, in recomputation and in the backward pass."""
    precision = shape.precision if kind is not CostKind.MEMORY else Precision.FP32

    def cost(during: Pass, calls: int, flops: int, moved: int) -> OperatorCost:
        return OperatorCost(
            operator=operator,
            kind=kind,
            during=during,
            precision=precision,
            count=calls,
            fixed_flops=fixed_flops,
            flops_per_sample=flops,
            fixed_bytes=fixed,
            bytes_per_sample=moved,
        )

    costs = [cost(Pass.FORWARD, count, flops, moved)]
    if again := round(count * recomputed):
        costs.append(cost(Pass.RECOMPUTATION, again, flops, moved))
    # A frozen weight has no gradient: the backward pass is one product, for the input's gradient.
    trains = shape.trains("head.weight") if operator == "head" else shape.trains_layers
    frozen = kind in (CostKind.MATMUL, CostKind.GROUPED) and not trains
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


CLOSED_FORM_SOURCE = "closed form, after https://arxiv.org/abs/2205.05198 (section 4.1)"
"""Source of the terms over such a log."""
_ID_BYTES = 8


def closed_form_log(model: ModelFacts, request: TraceRequest) -> AllocationLog:
    """Return a log of one micro-batch by closed forms: layers, saved activations, gradients and costs.

    It follows transformers' code for dense decoders and encoders with fused attention, and omits
    operators of single families; LoRA and frozen layers save as much as full training, which is more than
    they need. The tracer covers both.

    Args:
        model: its dimensions; those that are 0 are assumed to be as in most models.

    Raises:
        UserError: The request is for a stage of a pipeline.
    """
    if request.pipeline_parallel_size > 1:
        raise UserError(
            "pipeline-parallel-not-estimated",
            "--fast does not estimate pipeline parallelism",
            found=f"--fast with {request.pipeline_parallel_size} pipeline stages",
            why="closed forms count whole models, not stages and the micro-batches in flight between them",
            fix="leave out --fast: the stages are then traced",
        )
    return _Writer(Shape(facts=model, request=request)).write()


class _Writer:
    """Writes the events of both passes in order."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._modules = [""]
        self._parameters: list[TracedParameter] = []
        self._holders: list[list[int]] = [[]]
        self._storages: list[tuple[TensorKind, int, int, int]] = []
        self._events: list[tuple[Event, int]] = []
        self._gradients: dict[int, int] = {}
        self._kept: list[list[int]] = []

    def write(self) -> AllocationLog:
        """Write both passes and return the log."""
        shape, facts = self._shape, self._shape.facts
        embedding = self._module("model.embeddings", shape.embedding_elements)
        layers = [self._layer(number) for number in range(facts.num_layers)]
        head = self._module("head", shape.head_elements)

        ids = self._allocate(TensorKind.INPUT, -1, 3 * _ID_BYTES * shape.request.sequence_length)
        self._note(Event.FORWARD_ENTER, 0)
        self._note(Event.FORWARD_ENTER, embedding)
        stream = shape.stream_bytes(0)
        whole = [self._allocate(TensorKind.ACTIVATION, embedding, stream + self._mask_bytes())]
        self._note(Event.FORWARD_LEAVE, embedding)
        for number, module in enumerate(layers):
            self._forward(number, module, TensorKind.ACTIVATION)
            if shape.is_checkpointed(number):
                self._free(*self._kept[number])
                self._kept[number] = []
                if not shape.request.activation_offload:
                    self._kept[number].append(self._input_of(number, module[0], TensorKind.ACTIVATION))
        outputs, losses = self._head_forward(head)
        self._note(Event.FORWARD_LEAVE, 0)
        self._note(Event.FORWARD_ENDS, 0)
        self._note(Event.BACKWARD_ENTER, 0)
        self._head_backward(head, losses)
        incoming = self._allocate(
            TensorKind.ACTIVATION_GRADIENT, 0, self._shape.stream_bytes(facts.num_layers - 1)
        )
        for number in reversed(range(facts.num_layers)):
            incoming = self._backward(number, layers[number], incoming)
        self._note(Event.BACKWARD_ENTER, embedding)
        self._gradients_of(embedding)
        self._note(Event.BACKWARD_LEAVE, embedding)
        self._free(incoming, *whole)
        self._note(Event.BACKWARD_LEAVE, 0)
        self._free(*outputs, ids)
        return self._log()

    # Modules and parameters.

    def _module(self, name: str, *elements: int, is_adapter: bool = False, is_packed: bool = False) -> int:
        """Add a module with its non-empty parameters and return its index."""
        self._modules.append(name)
        self._holders.append([])
        module = len(self._modules) - 1
        parts = [part for element in elements for part in self._parts(name, element, is_adapter=is_adapter)]
        for number, (num_elements, trains) in enumerate(parts):
            self._holders[module].append(len(self._parameters))
            self._parameters.append(
                TracedParameter(
                    name=f"{name}.weight{number or ''}",
                    num_elements=self._shape.packed_bytes(num_elements) if is_packed else num_elements,
                    bytes_per_element=4 if is_adapter else 1 if is_packed else self._shape.weight_bytes,
                    is_packed=is_packed,
                    trains=trains,
                    module=module,
                )
            )
        return module

    def _parts(self, name: str, num_elements: int, *, is_adapter: bool) -> list[tuple[int, bool]]:
        """Return (elements, trains) for the parts of a parameter that train and that do not.

        In a model that trains partly, with a script's own adapters or frozen parameters, the same fraction of
        each parameter trains. ASSUMPTION: closed forms do not know which ones do.
        """
        facts = self._shape.facts
        trains = is_adapter or self._shape.trains(f"{name}.weight")
        trained = num_elements if trains else 0
        if trains and not is_adapter and facts.num_trainable_parameters < facts.num_parameters:
            trained = num_elements * facts.num_trainable_parameters // facts.num_parameters
        return [
            (count, does) for count, does in ((trained, True), (num_elements - trained, False)) if count > 0
        ]

    def _layer(self, number: int) -> list[int]:
        """Add a layer and its modules; return its index, then theirs."""
        shape, lora = self._shape, self._shape.request.lora
        name = f"model.layers.{number}"
        modules = [self._module(name), self._module(f"{name}.norms", shape.layer_rest(number))]
        is_packed = shape.packed_elements > 0
        for matrix in shape.matrices(number):
            modules.append(self._module(f"{name}.{matrix.name}", matrix.num_elements, is_packed=is_packed))
            if lora is not None and matrix.name in shape.adapted:
                down, up = lora.rank * matrix.rows, lora.rank * matrix.columns
                modules.append(self._module(f"{name}.{matrix.name}.lora", down, up, is_adapter=True))
        return modules

    # Saved activations.

    def _mask_bytes(self) -> int:
        """Return the bytes per sample of an attention mask with padding, made once for all layers."""
        shape = self._shape
        tokens = shape.request.sequence_length
        return shape.weight_bytes * tokens * tokens if shape.request.is_padded else 0

    def _attention_bytes(self, layer: int) -> int:
        """Return the bytes per sample that one attention saves, with its norm and dropout."""
        shape, facts = self._shape, self._shape.facts
        tokens, width, query = shape.tokens(layer), shape.compute_bytes, shape.query_width
        # With a mask, torch repeats grouped keys for each query head.
        key = query if shape.request.is_padded else shape.key_width
        kept = width * (2 * query + 2 * key) + self._norm_bytes(shape.query_casts)
        if shape.has_dropout:
            kept += facts.hidden_size
        if shape.has_head_norms:
            kept += (4 + shape.compute_bytes) * (query + shape.key_width)
        heads = facts.num_attention_heads
        if shape.request.attention == "eager":
            # fp32 softmax and its cast for the product with the values; with dropout its mask and result.
            scores = 4 + (width if width < 4 else 0) + ((1 + width) if shape.has_dropout else 0)
            return tokens * kept + heads * tokens * tokens * scores
        cast_mask = self._mask_bytes() if shape.is_cast else 0
        return tokens * (kept + 4 * heads) + cast_mask * shape.compute_bytes // shape.weight_bytes

    def _mlp_bytes(self, layer: int) -> int:
        """Return the bytes per sample that one feed-forward block saves, with its norm and dropout."""
        shape, facts = self._shape, self._shape.facts
        width, uses = shape.compute_bytes, shape.experts_per_token
        kept = uses * shape.inner_bytes * shape.inner_width + self._norm_bytes(2 if facts.is_gated else 1)
        if facts.num_experts > 1:
            kept += 2 * uses * width * facts.hidden_size  # each expert's tokens, gathered and weighted
        if shape.has_dropout:
            kept += facts.hidden_size
        return shape.tokens(layer) * kept

    def _norm_bytes(self, num_products: int) -> int:
        """Return the bytes per token that a norm and the matrix products after it save of their input."""
        shape = self._shape
        result = shape.compute_bytes * (num_products if shape.is_cast else 1)
        if shape.has_rms_norm:  # the fp32 input and the normed one
            return (4 + shape.weight_bytes + result) * shape.facts.hidden_size
        return (shape.weight_bytes + result) * shape.facts.hidden_size

    def _cast_bytes(self, elements: int) -> int:
        """Return the bytes of autocast's copies of weights, which live as long as the autograd graph."""
        shape = self._shape
        return shape.compute_bytes * elements if shape.is_cast else 0

    # The passes.

    def _forward(self, number: int, modules: list[int], kind: TensorKind) -> None:
        """Write one layer's forward pass, first or recomputed, and remember what it saves."""
        shape = self._shape
        layer, *inner = modules
        self._note(Event.FORWARD_ENTER, layer)
        matrices = sum(matrix.num_elements for matrix in shape.matrices(number))
        for module in inner:
            self._note(Event.FORWARD_ENTER, module)
            self._note(Event.FORWARD_LEAVE, module)
        attention = shape.num_attentions(number) * self._attention_bytes(number)
        kept = [
            self._allocate(kind, layer, attention, fixed=self._cast_bytes(matrices)),
            self._allocate(kind, layer, self._mlp_bytes(number)),
        ]
        self._unpack(layer)
        self._note(Event.FORWARD_LEAVE, layer)
        if kind is TensorKind.ACTIVATION:
            self._kept.append(kept)
        else:
            self._kept[number] += kept

    def _input_of(self, number: int, layer: int, kind: TensorKind) -> int:
        """Allocate the input of a checkpointed layer, which is kept or copied back."""
        return self._allocate(kind, layer, self._shape.stream_bytes(number))

    def _backward(self, number: int, modules: list[int], incoming: int) -> int:
        """Write one layer's backward pass and return the storage of its input's gradient."""
        shape = self._shape
        layer, *inner = modules
        self._note(Event.BACKWARD_ENTER, layer)
        if shape.is_checkpointed(number):
            if shape.request.activation_offload:
                self._kept[number].append(self._input_of(number, layer, TensorKind.RECOMPUTED))
            self._forward(number, modules, TensorKind.RECOMPUTED)
        width = shape.experts_per_token * shape.compute_bytes * shape.inner_width * shape.tokens(number)
        wide = self._allocate(TensorKind.ACTIVATION_GRADIENT, layer, (2 + shape.facts.is_gated) * width)
        outgoing = self._allocate(TensorKind.ACTIVATION_GRADIENT, layer, self._shape.stream_bytes(number))
        self._unpack(layer)
        for module in reversed(inner):
            self._note(Event.BACKWARD_ENTER, module)
            self._gradients_of(module)
            self._note(Event.BACKWARD_LEAVE, module)
            if module == inner[len(inner) // 2]:
                self._free(wide, self._kept[number].pop())
        self._free(incoming, *self._kept[number])
        self._note(Event.BACKWARD_LEAVE, layer)
        return outgoing

    def _head_forward(self, head: int) -> tuple[list[int], list[int]]:
        """Write the head and the loss; return the storages of the outputs and of what the two save."""
        shape = self._shape
        logits = shape.tokens(shape.facts.num_layers - 1) * shape.logits_at_once
        cast = self._cast_bytes(shape.logits_width * shape.facts.hidden_size)
        self._note(Event.FORWARD_ENTER, head)
        last = shape.tokens(shape.facts.num_layers - 1) * self._norm_bytes(1)
        kept = [self._allocate(TensorKind.ACTIVATION, head, last, fixed=cast)]
        self._note(Event.FORWARD_LEAVE, head)
        # Under autocast accelerate casts the outputs to fp32 (convert_outputs_to_fp32).
        width = 4 if shape.request.autocast is not None else shape.compute_bytes
        output = self._allocate(TensorKind.OUTPUT, 0, width * logits)
        is_cast = shape.loss_bytes > shape.compute_bytes
        upcast = self._allocate(TensorKind.ACTIVATION, 0, shape.loss_bytes * logits if is_cast else 0)
        kept.append(self._allocate(TensorKind.ACTIVATION, 0, shape.loss_bytes * logits))  # log_softmax's
        self._free(upcast)
        return [output], kept

    def _head_backward(self, head: int, losses: list[int]) -> None:
        shape = self._shape
        logits = shape.tokens(shape.facts.num_layers - 1) * shape.logits_at_once
        # The gradients of nll_loss and log_softmax are live together.
        gradient = self._allocate(TensorKind.ACTIVATION_GRADIENT, 0, 2 * shape.loss_bytes * logits)
        self._free(losses[1])
        narrow = self._allocate(TensorKind.ACTIVATION_GRADIENT, 0, shape.compute_bytes * logits)
        self._free(gradient)
        self._note(Event.BACKWARD_ENTER, head)
        self._gradients_of(head)
        self._note(Event.BACKWARD_LEAVE, head)
        self._free(narrow, losses[0])

    def _gradients_of(self, module: int) -> None:
        """Write the gradients of a module's parameters."""
        for parameter in self._holders[module]:
            weight = self._parameters[parameter]
            if weight.trains:
                self._gradients[parameter] = self._allocate(
                    TensorKind.GRADIENT, module, 0, fixed=weight.num_elements * weight.bytes_per_element
                )
                self._note(Event.GRADIENT_READY, parameter)

    def _unpack(self, module: int) -> None:
        """Write the largest 4-bit matrix as it is unpacked to be multiplied."""
        num_bytes = self._shape.compute_bytes * self._shape.packed_elements
        if num_bytes:
            self._free(self._allocate(TensorKind.WORKSPACE, module, 0, fixed=num_bytes))

    def _note(self, event: Event, argument: int) -> None:
        self._events.append((event, argument))

    def _allocate(self, kind: TensorKind, module: int, per_sample: int, *, fixed: int = 0) -> int:
        self._storages.append((kind, fixed, per_sample, module))
        self._note(Event.ALLOCATE, len(self._storages) - 1)
        return len(self._storages) - 1

    def _free(self, *storages: int) -> None:
        for storage in storages:
            self._note(Event.FREE, storage)

    def _log(self) -> AllocationLog:
        kinds, fixed, per_sample, modules = zip(*self._storages, strict=True)
        return AllocationLog(
            least_micro_batch_size=1,
            modules=tuple(self._modules),
            module_parameters=tuple(tuple(held) for held in self._holders),
            parameters=tuple(self._parameters),
            buffer_bytes=(),
            storages=Storages(
                kinds=kinds,
                fixed_bytes=fixed,
                bytes_per_sample=per_sample,
                modules=modules,
                operators=(0,) * len(kinds),
            ),
            operators=("closed form",),
            codes=bytes(code for code, _ in self._events),
            arguments=tuple(argument for _, argument in self._events),
            gradient_storages=tuple(
                self._gradients.get(number, -1) for number in range(len(self._parameters))
            ),
            costs=closed_form_costs(self._shape),
        )
