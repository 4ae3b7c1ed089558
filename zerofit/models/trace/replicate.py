"""Replicates layers: the log of a model with more layers from one with fewer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import Event, TensorKind
from zerofit.models.trace.affine import AffineLog
from zerofit.models.trace.raw import CALL, sort_frees

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zerofit.models.trace.layers import Stack
    from zerofit.models.trace.raw import Skeleton


class NotPeriodicError(Exception):
    """The layers of a stack do not behave alike."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A range of events, and its layer, or -1."""

    start: int
    end: int
    layer: int
    run: int
    """Number of its pass: of forward passes, or 1 for the backward pass; -1 without a layer."""
    is_forward: bool


def replicate(log: AffineLog, skeleton: Skeleton, stack: Stack, *, num_layers: int, copies: int) -> AffineLog:
    """Return the log with additional periods of a stack.

    A layer's events are those from the start of its forward to the start of the next one's, in each forward
    pass, and from where the backward pass reaches it to where it reaches the layer before. They may refer to
    storages of their own layer and of its two neighbours, and to others that are equal for all layers.

    Args:
        log: of the shortened model.
        skeleton: of the whole model.
        num_layers: number of layers in the log.
        copies: number of periods to add.

    Raises:
        NotPeriodicError: the events are not periodic.
    """
    return _Replication(log, skeleton, stack, num_layers, copies).result()


class _Replication:
    def __init__(
        self, log: AffineLog, skeleton: Skeleton, stack: Stack, num_layers: int, copies: int
    ) -> None:
        self._log, self._skeleton, self._stack = log, skeleton, stack
        self._num_layers, self._copies = num_layers, copies
        self._copied = range(stack.copied, stack.copied + stack.period)
        self._more = copies * stack.period
        self._numbers = {name: number for number, name in enumerate(skeleton.modules)}
        self._parameters = {parameter.name: number for number, parameter in enumerate(skeleton.parameters)}
        self._layer = re.compile(rf"{re.escape(stack.path)}\.(\d+)(?=\.|$)")
        self._segments = self._cut()
        self._owners = self._find_owners()
        self._new: dict[tuple[int, int, int], int] = {}
        self._elsewhere: dict[int, int] = {}
        self._out = AffineLog(calls=log.calls, operator_names=log.operator_names)

    def result(self) -> AffineLog:
        for segment, layer in self._instances():
            self._emit(segment, layer)
        sort_frees(self._out.codes, self._out.arguments)
        return self._out

    def _cut(self) -> list[_Segment]:
        log, order = self._log, range(self._num_layers)
        layers = [self._numbers[f"{self._stack.path}.{index}"] for index in order]
        found: list[_Segment] = []
        for first, last, is_forward in _passes(log.codes):
            entered = zip(log.codes[first:last], log.arguments[first:last], strict=True)
            if not is_forward:
                edges = self._backward_edges(layers, first, last)
                found += _segments(edges, reversed(order), len(found), is_forward=False)
            elif not first or (Event.FORWARD_ENTER, layers[0]) in entered:
                edges = self._forward_edges(layers, first, last)
                found += _segments(edges, order, len(found), is_forward=True)
                for again in self._edges_after(edges[-1], last):
                    found += _segments(again, order, len(found), is_forward=True)
        segments, end = list[_Segment](), 0
        for segment in found:
            if segment.start < end:
                raise NotPeriodicError(f"the layers of {self._stack.path} overlap")
            if segment.start > end:
                segments.append(_Segment(end, segment.start, -1, -1, True))
            segments.append(segment)
            end = segment.end
        return [*segments, _Segment(end, len(log.codes), -1, -1, True)]

    def _forward_edges(self, layers: list[int], first: int, last: int) -> list[int]:
        """Return where each layer's forward begins, and where the last one's ends with what it frees."""
        codes = self._log.codes
        starts = [self._find(Event.FORWARD_ENTER, layer, first, last) for layer in layers]
        end = self._find(Event.FORWARD_LEAVE, layers[-1], starts[-1], last) + 1
        while end < len(codes) and codes[end] == Event.FREE:
            end += 1
        return [*starts, end]

    def _edges_after(self, start: int, end: int) -> Iterator[list[int]]:
        """Yield where each layer begins, and the last one ends, in each round over them behind their forward.

        Beam search reorders the caches of all layers so.
        """
        log, turns, ends = self._log, list[tuple[int, int]](), 0
        for place in range(start, end):
            if log.codes[place] != Event.ALLOCATE:
                continue
            module = log.modules[log.arguments[place]]
            match = self._layer.match(self._skeleton.modules[module]) if module >= 0 else None
            if match is not None and (not turns or turns[-1][1] != int(match[1])):
                turns.append((place, int(match[1])))
            ends = place + 1 if match else ends
        number, order = self._num_layers, [*range(self._num_layers)]
        rounds = [turns[first : first + number] for first in range(0, len(turns), number)]
        if any([layer for _, layer in turn] != order for turn in rounds):
            return
        while ends < end and log.codes[ends] == Event.FREE:
            ends += 1
        lasts = [turn[0][0] for turn in rounds[1:]]
        for turn, last in zip(rounds, [*lasts, ends], strict=False):
            yield [*(place for place, _ in turn), last]

    def _backward_edges(self, layers: list[int], turn: int, end: int) -> list[int]:
        """Return where the backward pass reaches each layer, from the last, and where it ends."""
        codes = self._log.codes
        backs = [self._find(Event.BACKWARD_ENTER, layer, turn, end) for layer in reversed(layers)]
        tail = end
        while codes[tail - 1] == Event.FREE:
            tail -= 1  # events after the last layer
        return [*backs, tail]

    def _find(self, code: int, argument: int, start: int, end: int) -> int:
        log = self._log
        for place in range(start, end):
            if log.codes[place] == code and log.arguments[place] == argument:
                return place
        raise NotPeriodicError(f"no event {code} of {self._skeleton.modules[argument]}")

    def _find_owners(self) -> dict[int, tuple[int, int, int]]:
        """Return the run, the layer and the rank within the layer of each storage allocated in a layer.

        Gradient sums, which no other layer refers to, are ranked from -1 down: the first of several layers
        that read one tensor gives the view to which only the first sum is added.
        """
        owners = {}
        for segment in self._segments:
            if segment.layer < 0:
                continue
            num_sums = num_others = 0
            for place in range(segment.start, segment.end):
                storage = self._log.arguments[place]
                if self._log.codes[place] != Event.ALLOCATE:
                    continue
                if self._log.kinds[storage] == TensorKind.SUM:
                    num_sums += 1
                    owners[storage] = (segment.run, segment.layer, -num_sums)
                else:
                    owners[storage] = (segment.run, segment.layer, num_others)
                    num_others += 1
        return owners

    def _instances(self) -> Iterator[tuple[_Segment, int]]:
        """Yield each segment with its layer number in the longer stack."""
        copied = [segment for segment in self._segments if segment.layer in self._copied]
        period = self._stack.period
        for segment in self._segments:
            layer = segment.layer
            is_last_before = layer == (self._copied[-1] if segment.is_forward else self._copied[-1] + 1)
            moved = layer + self._more if layer > self._copied[-1] else layer
            yield segment, moved
            if not is_last_before:
                continue
            same = [alike for alike in copied if alike.run == segment.run]
            turns = range(1, self._copies + 1)
            for turn in turns if segment.is_forward else reversed(turns):
                for alike in same:
                    yield alike, alike.layer + turn * period

    def _moved(self, layer: int, segment: _Segment, instance: int) -> int:
        """Return the layer of the longer stack that a segment's reference to a layer stands for."""
        if segment.layer >= 0 and abs(layer - segment.layer) <= 1:
            return instance + layer - segment.layer
        if segment.layer in self._copied and self._copies:
            raise NotPeriodicError("a layer refers to another that is no neighbour")
        return layer + self._more if layer > self._copied[-1] else layer

    def _copies_of(self, index: int, segment: _Segment) -> list[int]:
        """Return the copies' counterparts of a storage that outlives all layers."""
        owner = self._owners.get(index)
        if segment.layer >= 0 or owner is None or owner[1] not in self._copied:
            return []
        turns = range(1, self._copies + 1)
        return [self._new[owner[0], owner[1] + turn * self._stack.period, owner[2]] for turn in turns]

    def _is_not_yet(self, index: int, segment: _Segment, instance: int) -> bool:
        """Return True if a layer frees a storage shared by all layers while a copy of it still follows."""
        if segment.layer not in self._copied or index in self._owners:
            return False
        return instance != (segment.layer + self._more if segment.is_forward else segment.layer)

    def _storage(self, index: int, segment: _Segment, instance: int) -> int:
        owner = self._owners.get(index)
        if owner is None:
            return self._elsewhere[index]
        run, layer, rank = owner
        key = (run, self._moved(layer, segment, instance), rank)
        if key not in self._new:
            raise NotPeriodicError("neighbouring layers do not make the same storages")
        return self._new[key]

    def _name(self, name: str, segment: _Segment, instance: int) -> str:
        match = self._layer.match(name)
        if match is None:
            return name
        return f"{self._stack.path}.{self._moved(int(match[1]), segment, instance)}{name[match.end() :]}"

    def _module(self, number: int, segment: _Segment, instance: int) -> int:
        if number < 0:
            return -1
        return self._numbers[self._name(self._skeleton.modules[number], segment, instance)]

    def _emit(self, segment: _Segment, instance: int) -> None:
        log, out = self._log, self._out
        for place in range(segment.start, segment.end):
            code, argument = log.codes[place], log.arguments[place]
            if code == Event.ALLOCATE:
                new = len(out.kinds)
                owner = self._owners.get(argument)
                if owner is None:
                    self._elsewhere[argument] = new
                else:
                    self._new[(owner[0], instance, owner[2])] = new
                out.kinds.append(log.kinds[argument])
                out.num_bytes.append(log.num_bytes[argument])
                out.modules.append(self._module(log.modules[argument], segment, instance))
                out.operators.append(log.operators[argument])
                if log.streams:
                    out.streams.append(log.streams[argument])
                argument = new
            elif code == Event.FREE:
                if self._is_not_yet(argument, segment, instance):
                    continue
                for number in self._copies_of(argument, segment):
                    out.note(code, number)
                argument = self._storage(argument, segment, instance)
            elif code == Event.GRADIENT_READY:
                name = self._name(self._skeleton.parameters[argument].name, segment, instance)
                storage = self._storage(log.gradient_storages[argument], segment, instance)
                argument = self._parameters[name]
                out.gradient_storages[argument] = storage
            elif code not in (CALL, Event.FORWARD_ENDS, Event.LAYERS_END, Event.BACKWARD_ENDS):
                argument = self._module(argument, segment, instance)
            out.note(code, argument)


def _passes(codes: list[int]) -> Iterator[tuple[int, int, bool]]:
    """Yield (first event, one past the last, True if forward) of each forward and backward pass."""
    turns = [place for place, code in enumerate(codes) if code == Event.FORWARD_ENDS]
    ends = [place for place, code in enumerate(codes) if code == Event.BACKWARD_ENDS]
    if not ends:
        yield from ((first, last, True) for first, last in pairwise([0, *turns]))
        if Event.BACKWARD_ENTER in codes:
            yield turns[0], len(codes), False
        return
    layers_end = [place for place, code in enumerate(codes) if code == Event.LAYERS_END]
    for start, turn, end in zip([0, *ends], turns, layers_end, strict=False):
        yield start, turn, True
        yield turn, end, False


def _segments(edges: list[int], layers: Iterable[int], run: int, *, is_forward: bool) -> list[_Segment]:
    """Return a segment for each layer, from one edge to the next."""
    spans = zip(pairwise(edges), layers, strict=True)
    return [_Segment(start, end, layer, run, is_forward) for (start, end), layer in spans]
