"""forward_log: a model's parameters by module, in the order of a forward pass."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import AllocationLog, Event, Storages, TracedParameter, TraceRequest
from zerofit.planning.estimate.closed_form.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.facts import ModelFacts
    from zerofit.core.strategy import Precision

FUSED_GATE_FAMILIES = frozenset({"glm", "glm4", "phi3"})
"""Families with gate and up in one matrix, gate_up_proj. Source: transformers 5.23, their MLP classes."""


def shape_of(model: ModelFacts, precision: Precision) -> Shape:
    """Return the matrices of a model with weights in this format."""
    return Shape(facts=model, request=TraceRequest(sequence_length=1, weights=precision))


def forward_log(model: ModelFacts, precision: Precision) -> AllocationLog:
    """Return a log of one forward pass without activations: what ZeRO-3 gathers and releases, in order.

    Elements sum to the model's parameters. A tied head gathers the embedding's matrix again.

    Args:
        model: its dimensions; those that are 0 are assumed to be as in most models.
    """
    shape = shape_of(model, precision)
    held: list[tuple[int, ...]] = [()]
    elements: list[int] = []
    numbers = count()
    for sizes in _modules(shape):
        held.append(tuple(next(numbers) for _ in sizes))
        elements += sizes
    if not shape.head_elements:
        held.append(held[1][:1])
    events = [(Event.FORWARD_ENTER, 0)]
    for module in range(1, len(held)):
        events += [(Event.FORWARD_ENTER, module), (Event.FORWARD_LEAVE, module)]
    events.append((Event.FORWARD_LEAVE, 0))
    holder = {number: module for module in reversed(range(len(held))) for number in held[module]}
    return AllocationLog(
        least_micro_batch_size=1,
        modules=("", *(f"modules.{number}" for number in range(1, len(held)))),
        module_parameters=tuple(held),
        parameters=tuple(
            TracedParameter(
                name=f"modules.{holder[number]}.{number}",
                num_elements=size,
                bytes_per_element=shape.weight_bytes,
                trains=False,
                module=holder[number],
            )
            for number, size in enumerate(elements)
        ),
        buffer_bytes=(),
        storages=Storages(kinds=(), fixed_bytes=(), bytes_per_sample=(), modules=(), operators=()),
        operators=(),
        codes=bytes(code for code, _ in events),
        arguments=tuple(argument for _, argument in events),
        gradient_storages=(-1,) * len(elements),
        costs=(),
    )


def _modules(shape: Shape) -> Iterator[list[int]]:
    """Yield the elements of each module's parameters, in the order of a forward pass."""
    model = shape.facts
    table = model.vocab_size * model.hidden_size
    layers = [list(_layer(shape, layer)) for layer in range(model.num_layers)]
    inside = _elements(layers)
    if inside + min(table, shape.outside_elements) > model.num_parameters:
        layers = _even_layers(model)
        inside = _elements(layers)
    rest = model.num_parameters - inside - shape.head_elements
    embedding = min(table, rest) or rest
    yield [embedding]
    rest -= embedding
    largest = model.largest_parameter or table or rest
    while rest > 0:
        yield [min(rest, largest)]
        rest -= largest
    for layer in layers:
        yield from layer
    if shape.head_elements:
        yield [shape.head_elements]


def _layer(shape: Shape, layer: int) -> Iterator[list[int]]:
    """Yield the parameters of each module of a layer; containers and activations have none.

    ZeRO-3 prefetches at the start of every module, even one without parameters.
    """
    yield []
    yield [shape.layer_rest(layer)]
    block = ""
    for name, sizes in _holders(shape, layer):
        if name.partition(".")[0] != block:
            block = name.partition(".")[0]
            yield []
        yield sizes
    yield []


def _holders(shape: Shape, layer: int) -> Iterator[tuple[str, list[int]]]:
    """Yield each module of a layer that has matrices, with the elements of its parameters.

    Some families fuse query, key and value, or gate and up. The experts of a mixture are one module with two
    parameters, which are gathered together. Source: transformers 5.23, MixtralExperts, Phi3MLP.
    """
    is_mixture = shape.facts.num_experts > 1
    fuses_gate = is_mixture or shape.facts.model_type in FUSED_GATE_FAMILIES
    fused = {"query", "key", "value"} if shape.query_casts == 1 else set()
    fused |= {"gate", "up"} if fuses_gate else set()
    found: list[tuple[str, list[int]]] = []
    for matrix in shape.matrices(layer):
        block, _, part = matrix.name.partition(".")
        before = found[-1] if found else ("", [])
        was = before[0].rpartition(".")[2]
        if part in fused and was in fused and before[0].startswith(f"{block}."):
            before[1][-1] += matrix.num_elements
        elif is_mixture and part == "down":
            before[1].append(matrix.num_elements)
        else:
            found.append((matrix.name, [matrix.num_elements]))
    yield from found


def _elements(layers: list[list[list[int]]]) -> int:
    return sum(sum(sizes) for layer in layers for sizes in layer)


def _even_layers(model: ModelFacts) -> list[list[list[int]]]:
    """Return layers of equal size, if the dimensions add up to more than the model has.

    ASSUMPTION: the largest parameter of a layer is a third of it, as in a feed-forward block.
    """
    inside = max(0, model.num_parameters - 2 * model.vocab_size * model.hidden_size)
    each = inside // max(1, model.num_layers)
    third = each // 3
    if model.num_experts > 1 and third:  # experts are one module: _holders
        return [[[each - third, third]] for _ in range(model.num_layers)]
    sizes = [size for size in (third, third, each - 2 * third) if size]
    return [[[size] for size in sizes] for _ in range(model.num_layers)]
