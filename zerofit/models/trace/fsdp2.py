"""FSDP2 in a trace: the engine itself runs on fake tensors, as rank 0 of ranks that are not there."""

from __future__ import annotations

import copy
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import Event, Save, Shard, TensorKind
from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.core.upstream.fake_ranks import fake_ranks
from zerofit.core.upstream.fsdp2 import (
    ACCUMULATE,
    ALL_GATHER,
    ENGINE_FILES,
    GATHERED_BY,
    PART_OF,
    check_tied,
    ends_told,
    gather_each_unit,
    host_copies,
    local_tensor,
    make_plugin,
    offload_mode,
    padded_elements,
    reshard_after_evaluation,
    shard,
    sharded_parameter,
    stream_numbers,
    units_of,
    whole_parameter,
    whole_state_dict,
)
from zerofit.models.trace.packed import is_packed
from zerofit.models.trace.prepare import attribute_replaced
from zerofit.models.trace.recorder import Recorder, watching
from zerofit.models.trees import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.core.allocation_log import Sharding, TraceRequest

_KINDS = {ALL_GATHER: TensorKind.GATHER_BUFFER, ACCUMULATE: TensorKind.GRADIENT}
_MOST_FRAMES = 24
"""Python calls between FSDP2's own code and an operator, at most."""


@contextmanager
def as_rank_0(request: TraceRequest) -> Iterator[Any]:
    """Yield the mesh of the ranks of a request; None without FSDP2. No FakeTensorMode may be active.

    Raises:
        UserError: this process is in a process group.
    """
    if request.sharding is None:
        yield None
        return
    with ExitStack() as stack:
        try:
            mesh = stack.enter_context(fake_ranks(request.sharding.copies, request.sharding.shard_size))
        except RuntimeError as error:
            raise UserError(
                "trace-in-process-group",
                "FSDP2 can't be traced here",
                found=str(error),
                why="the engine itself runs on fake tensors, in a process group whose collectives do nothing",
                fix="plan in a process of its own: zerofit plan",
            ) from error
        yield mesh


class ShardedModel:
    """A model that FSDP2 has sharded as rank 0, on fake or real tensors.

    Args:
        model: is sharded in place.
        mesh: of its ranks.
        keeps_formats: True if trained weights keep their formats in mixed precision, as beside 4-bit weights.
    """

    def __init__(self, model: Any, mesh: Any, sharding: Sharding, *, keeps_formats: bool = False) -> None:
        self._host: list[Any] = []
        self._recorder: ShardedRecorder | None = None
        self.offloads = sharding.cpu_offload
        mixed = "no" if sharding.precision in (None, Precision.FP32) else str(sharding.precision)
        plugin = make_plugin(
            model,
            reshard_after_forward=sharding.reshard_after_forward,
            cpu_offload=sharding.cpu_offload,
            mixed_precision=mixed,
            ignored_modules=_unsharded(model) or None,
        )
        kind, names = type(model).__name__, [name for name, _ in model.named_parameters()]
        with self._copies():
            self.model = shard(model, plugin, mesh, mixed_precision="no" if keeps_formats else mixed)
        check_tied(kind, names, self.model)
        reshard_after_evaluation(self.model)  # as in a launch; the next run then gathers anew

    def _copies(self) -> Any:
        return offload_mode(self._host, self._on_host) if self.offloads else nullcontext()

    def _on_host(self) -> Any:
        return self._recorder.ignoring() if self._recorder else nullcontext()

    @contextmanager
    def recorded_by(self, recorder: ShardedRecorder | None) -> Iterator[None]:
        """Let the model run inside; what is on the host is not recorded."""
        self._recorder = recorder
        with self._copies(), ExitStack() as stack:
            if recorder is not None:
                stack.enter_context(recorder.watching_resizes())
                stack.enter_context(ends_told(recorder.end_layers))
            yield
        self._recorder = None
        self.model.zero_grad(set_to_none=True)
        self._host.clear()

    def gather_first(self) -> None:
        """Gather each unit once, for which FSDP2 makes what it keeps."""
        with self._copies():
            gather_each_unit(self.model)

    def sync_gradients(self, wanted: bool) -> None:
        """Reduce gradients in the next backward pass, or keep them whole, as accelerate's no_sync does."""
        self.model.set_requires_gradient_sync(wanted)

    def shards(self) -> dict[str, Shard]:
        """Return what this rank holds of each parameter, by name."""
        units = {}
        for number, unit in enumerate(units_of(self.model)):
            for parameter in unit:
                units[id(sharded_parameter(parameter))] = number, padded_elements(parameter)
        found = {}
        for name, parameter in self.model.named_parameters():
            number, num_elements = units.get(id(parameter), (-1, parameter.numel()))
            own = local_tensor(parameter)
            found[name] = Shard(
                shape=tuple(own.shape),
                num_elements=num_elements,
                bytes_per_element=own.element_size(),
                unit=number,
            )
        return found

    def own_tensors(self) -> Iterator[Any]:
        """Yield the shards and the buffers, which live before and after a micro-batch."""
        for parameter in self.model.parameters():
            yield local_tensor(parameter)
        yield from self.model.buffers()

    def whole_gradients(self, recorder: ShardedRecorder) -> Iterator[Any]:
        """Hook the gathered weights, so that their gradients are known as such; yield the hooks' handles."""
        for unit in units_of(self.model):
            for parameter in unit:
                whole = whole_parameter(parameter)
                if whole is not None and whole.requires_grad:
                    yield whole.register_post_accumulate_grad_hook(recorder.note_whole_gradient)

    def streams(self) -> dict[int, int]:
        """Return the numbers of the engine's streams, by the ids of the streams."""
        return stream_numbers(self.model)


def _unsharded(model: Any) -> list[Any]:
    """Return the packed layers whose storage is no floating type, which accelerate leaves whole."""
    return [
        module for module in model.modules() if is_packed(module) and not module.weight.is_floating_point()
    ]


class ShardedRecorder(Recorder):
    """A Recorder that sees storages which FSDP2 resizes, the streams that it allocates on, and what for."""

    def __init__(self, *, is_padded: bool, as_on_cuda: bool, streams: dict[int, int]) -> None:
        super().__init__(is_padded=is_padded, as_on_cuda=as_on_cuda)
        self._streams = streams

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.__name__ == "wait_tensor.default":
            return args[0]  # as without fake tensors, which make a copy
        if any(local_tensor(leaf) is not leaf for _, leaf in leaves(args)):
            return function(*args, **kwargs)  # of DTensors, which have no storage of their own
        return super().call(function, args, kwargs)

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """Record each resize of a storage inside: to nothing is a free, from nothing an allocation."""
        storage_class = self._torch.UntypedStorage
        original = storage_class.resize_

        def resize(storage: Any, num_bytes: int) -> Any:
            changed = original(storage, num_bytes)
            self._resized(storage, int(num_bytes))
            return changed

        with attribute_replaced(storage_class, "resize_", resize):
            yield

    def _resized(self, storage: Any, num_bytes: int) -> None:
        if storage._cdata in self._live:
            self._die(storage._cdata)
        if num_bytes:
            self._adopt(storage, num_bytes, self._operator_number("resize_"), self._place())

    def note_whole_gradient(self, parameter: Any) -> None:
        """Mark a whole parameter's gradient, before it is reduced."""
        self.retag(parameter.grad, TensorKind.GRADIENT)

    def gradient_ready(self, parameter: int, gradient: Any) -> None:
        super().gradient_ready(parameter, local_tensor(gradient))

    def _bear(self, num_bytes: int, kind: TensorKind, operator: int, place: int) -> int:
        self.log.streams.append(self._streams.get(id(self._torch.cpu.current_stream()), 0))
        return super()._bear(num_bytes, kind, operator, place)

    def _kind(self) -> TensorKind:
        return _kind_by_frames() or super()._kind()


def _kind_by_frames() -> TensorKind | None:
    """Return the kind of a tensor that FSDP2's own code is allocating; None in other code."""
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code.co_name == "_call_impl":
            return None
        name = frame.f_code.co_name
        if ENGINE_FILES in frame.f_code.co_filename:
            if name in GATHERED_BY:
                return TensorKind.GATHERED
            if name in PART_OF:
                return _KINDS.get(PART_OF[name], TensorKind.REDUCE_BUFFER)
        next_frame = frame.f_back
        if next_frame is None:
            return None
        frame = next_frame
    return None


class ShardedRuns:
    """Runs a model under FSDP2 with few or all of its layers: a sharded copy of it for each number of layers.

    Args:
        run: records an optimizer step of a sharded model.
    """

    def __init__(self, model: Any, mesh: Any, request: TraceRequest, run: Callable[..., Any]) -> None:
        self._model, self._mesh, self._request, self._run = model, mesh, request, run
        self._copies: dict[tuple[str, ...], ShardedModel] = {}

    def run(self, skeleton: Any, samples: int) -> Any:
        """Return the log of one optimizer step with the layers that the model has now."""
        names = tuple(name for name, _ in self._model.named_modules())
        if names not in self._copies:
            self._copies[names] = sharded = self.shard(copy.deepcopy(self._model))
            sharded.gather_first()
        return self._run(self._copies[names], skeleton, samples)

    def shard(self, model: Any) -> ShardedModel:
        """Shard a model in place."""
        assert self._request.sharding is not None
        packed = self._request.quantization is not None
        return ShardedModel(model, self._mesh, self._request.sharding, keeps_formats=packed)


def saved_whole(sharded: ShardedModel) -> Save:
    """Return what a full state dict allocates, gathered tensor by tensor and copied to the host."""
    import torch

    recorder = ShardedRecorder(is_padded=False, as_on_cuda=False, streams={})
    for tensor in sharded.own_tensors():
        recorder.ignore(tensor)
    with watching(recorder), torch.no_grad(), host_copies(recorder.ignoring):
        whole_state_dict(sharded.model)
    recorder.close()
    log, numbers = recorder.log, dict[int, int]()
    entries = []
    for code, storage in zip(log.codes, log.arguments, strict=True):
        if code in (Event.ALLOCATE, Event.FREE) and log.num_bytes[storage]:
            entry = numbers.setdefault(storage, len(numbers)) + 1
            entries.append(entry if code == Event.ALLOCATE else -entry)
    return Save(sizes=tuple(log.num_bytes[storage] for storage in numbers), entries=tuple(entries))
