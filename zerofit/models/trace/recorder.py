"""Recorder: writes allocations and frees of storages, and runs of modules and operators into a RawLog."""

from __future__ import annotations

import bisect
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import Event, Pass, TensorKind
from zerofit.core.upstream.torch import known_device
from zerofit.models.trace.costs import CostBook
from zerofit.models.trace.known_values import KnownValues, is_fake
from zerofit.models.trace.raw import CALL, RawLog, sort_frees
from zerofit.models.trace.sparse import is_sparse, on_parts
from zerofit.models.trace.workspaces import scratch_bytes, stored_bytes
from zerofit.models.trees import leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.models.trace.raw import OperatorCall

_INDEXED_BY_MASKS = ("index.Tensor", "index_put.default", "index_put_.default", "_index_put_impl_.default")
"""Operators whose second argument is a list of indices, some of which may be masks."""
_INTO_ZEROS = {
    "scatter_add.default": "scatter_add_",
    "index_add.default": "index_add_",
    "index_put.default": "index_put_",
}
"""Autograd's backward of gather, index_select and indexing adds into zeros that it has just allocated, but
under fake tensors or a dispatch mode allocates another tensor for the sum. Source:
torch/csrc/autograd/FunctionsManual.cpp, gather_backward, index_select_backward_symint and index_backward."""


class Recorder:
    """Records one micro-batch.

    Args:
        is_padded: the answer if a model checks whether its attention mask hides anything.
        as_on_cuda: whether to use CUDA kernels' scratch memory and dtypes instead of the CPU's.
    """

    def __init__(self, *, is_padded: bool, as_on_cuda: bool) -> None:
        import torch
        from torch.utils.weak import WeakIdKeyDictionary

        self.log: RawLog[int] = RawLog()
        self.phase: TensorKind = TensorKind.INPUT
        self._torch = torch
        self._is_padded, self._as_on_cuda = is_padded, as_on_cuda
        self._book = CostBook()
        self._known = KnownValues()
        self._operators: dict[Any, int] = {}
        self._live: dict[int, tuple[Any, int]] = {}
        self._ignored: set[int] = set()
        self._stack: list[int] = []
        self._seen_up_to: list[int] = [0]
        self._ran_in: list[int] = [-1]
        self._last_module = -1
        self._from_mask: set[int] = set()
        self._from_labels: set[int] = set()
        self._from_chance: set[int] = set()
        self._sum: tuple[int, int, int, bool] | None = None
        self._views: Any = WeakIdKeyDictionary()
        self._ignores = False
        self._counts = True
        self._on_host: list[Any] = []
        self._outer_hooks: Any = None

    def begin_forward(self) -> None:
        """Record that the next micro-batch's inputs are made."""
        self.phase = TensorKind.INPUT

    def end_backward(self) -> None:
        """Record that one of several micro-batches is over."""
        self.log.note(Event.BACKWARD_ENDS, 0)

    def end_layers(self) -> None:
        """Record that the engine ends the backward pass."""
        self.log.note(Event.LAYERS_END, 0)

    def begin_backward(self) -> None:
        """Record that the forward pass has ended and the backward pass begins."""
        self.log.note(Event.FORWARD_ENDS, 0)
        self.phase = TensorKind.ACTIVATION_GRADIENT
        self._outer_hooks = self._saved_tensors_hooks()

    def enter(self, module: int) -> None:
        """Record that a module's forward begins."""
        self.log.note(Event.FORWARD_ENTER, module)
        self._push(module)

    def leave(self) -> None:
        """Record that the innermost module's forward has ended."""
        self.log.note(Event.FORWARD_LEAVE, self._stack.pop())
        self._remember_place()

    def _push(self, module: int) -> None:
        self._stack.append(module)
        self._remember_place()

    @contextmanager
    def inside(self, module: int) -> Iterator[None]:
        """Assign allocations inside to a module, and clean up the stack after an exception."""
        depth = len(self._stack)
        self._push(module)
        try:
            yield
        finally:
            del self._stack[depth:]
            self._remember_place()

    def _remember_place(self) -> None:
        number = self._torch._C._autograd._get_sequence_nr()
        place = self._stack[-1] if self._stack else -1
        if self._seen_up_to[-1] == number:
            self._ran_in[-1] = place
        else:
            self._seen_up_to.append(number)
            self._ran_in.append(place)

    def _place(self) -> int:
        """Return the running module, or in the backward pass the module that created the running node."""
        if not self.is_in_engine:
            return self._stack[-1] if self._stack else -1
        node = self._torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            if number < 1 << 62:  # AccumulateGrad has none
                self._last_module = self._ran_in[bisect.bisect_right(self._seen_up_to, number) - 1]
        return self._last_module

    @property
    def is_in_backward(self) -> bool:
        """True if the backward pass runs, including recomputation."""
        return self.phase is TensorKind.ACTIVATION_GRADIENT

    @property
    def is_in_engine(self) -> bool:
        """True if autograd's own code runs, excluding recomputation.

        A torch.autograd.Function is recomputed with gradients off, as under ZeRO-3 each linear layer is. Only
        torch's non-reentrant checkpoint adds hooks on saved tensors in a backward pass; a script's own, such
        as save_on_cpu's, are there before.
        """
        if not self.is_in_backward or self._torch.is_grad_enabled():
            return False
        return bool(self._saved_tensors_hooks() == self._outer_hooks)

    def _saved_tensors_hooks(self) -> Any:
        """Return the innermost hooks on saved tensors, or None."""
        return self._torch._C._autograd._top_saved_tensors_default_hooks(True)

    def ignore(self, tensor: Any) -> None:
        """Exclude a pre-existing tensor: a parameter or a buffer."""
        self._ignored.add(tensor.untyped_storage()._cdata)

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Exclude tensors created inside, which must live as long as the recorder."""
        self._ignores = True
        try:
            yield
        finally:
            self._ignores = False

    def to_host(self, tensor: Any) -> Any:
        """Return a copy of a tensor on the host, which is not recorded."""
        self._note_host_copy(tensor)
        with self._torch.no_grad(), self.ignoring(), self._without_costs():
            copy = tensor.clone(memory_format=self._torch.contiguous_format)
        self._on_host.append(copy)
        return copy

    def from_host(self, tensor: Any) -> Any:
        """Return a host tensor's copy on the GPU."""
        self._note_host_copy(tensor)
        with self._torch.no_grad(), self._without_costs():
            copy = tensor.clone()
        self.retag(copy, TensorKind.RECOMPUTED)
        return copy

    @contextmanager
    def _without_costs(self) -> Iterator[None]:
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def _note_host_copy(self, tensor: Any) -> None:
        self._note_call(self._book.host_copy(self._operator_number("host copy"), tensor, self._pass()))

    def index_of(self, tensor: Any) -> int | None:
        """Return the index of a tensor's storage, or None if it was not allocated here."""
        if is_sparse(tensor):
            return None
        found = self._live.get(tensor.untyped_storage()._cdata)
        return found[1] if found else None

    def retag(self, tensor: Any, kind: TensorKind) -> None:
        """Set the kind of a tensor's storage, once it is known."""
        index = self.index_of(tensor)
        if index is not None:
            self.log.kinds[index] = kind

    def retag_what_outlives_the_backward_pass(self) -> None:
        """Mark activations that are still live as outputs: the loss's graph keeps them.

        The backward pass frees what autograd saved, but not what a model's own torch.autograd.Function
        stores as an attribute of its context.
        """
        for _, index in self._live.values():
            if self.log.kinds[index] is TensorKind.ACTIVATION:
                self.log.kinds[index] = TensorKind.OUTPUT

    def know_inputs(self, batch: dict[str, Any]) -> None:
        """Remember which tensors are the attention mask, labels and masks of labels."""
        for name, tensor in batch.items():
            known = self._from_mask if name == "attention_mask" else self._from_labels
            index = self.index_of(tensor)
            if index is not None and name.endswith(("labels", "mask")):
                known.add(index)
            self._known.forget_zeros(tensor)

    def gradient_ready(self, parameter: int, gradient: Any) -> None:
        """Record that a parameter's gradient is complete.

        If several gradients are views of one storage, the first owns it, and the others get one of zero
        bytes.
        """
        index = self.index_of(gradient)
        if index is None or index in self.log.gradient_storages.values():
            index = self._bear(0, TensorKind.GRADIENT, self.log.operators[index or 0], self._last_module)
        self.log.kinds[index] = TensorKind.GRADIENT
        self.log.gradient_storages[parameter] = index
        self.log.note(Event.GRADIENT_READY, parameter)

    def close(self) -> None:
        """Record no more frees."""
        self._live.clear()
        sort_frees(self.log.codes, self.log.arguments)

    def _kind(self) -> TensorKind:
        if self.is_in_backward and not self.is_in_engine:
            return TensorKind.RECOMPUTED
        return self.phase

    def _bear(self, num_bytes: int, kind: TensorKind, operator: int, place: int) -> int:
        log = self.log
        index = len(log.kinds)
        log.kinds.append(kind)
        log.num_bytes.append(num_bytes)
        log.modules.append(place)
        log.operators.append(operator)
        log.note(Event.ALLOCATE, index)
        return index

    def _adopt(self, storage: Any, num_bytes: int, operator: int, place: int) -> int | None:
        key = storage._cdata
        if self._ignores:
            self._ignored.add(key)
        if key in self._live or key in self._ignored:
            return None
        index = self._bear(num_bytes, self._kind(), operator, place)
        self._live[key] = (weakref.ref(storage, lambda _: self._die(key)), index)
        return index

    def _die(self, key: int) -> None:
        if key not in self._live:
            return  # closed
        index = self._live.pop(key)[1]
        if self._sum is not None and self._sum[:2] == (len(self.log.codes), index):
            self._merge(*self._sum[2:], into=index)
        else:
            self.log.note(Event.FREE, index)
        self._sum = None

    def _merge(self, key: int, is_of_view: bool, *, into: int) -> None:
        """Undo the allocation of a sum that without fake tensors is added in place to its first operand.

        Autograd's input buffer adds in place if it holds the last reference to a tensor and its storage, but
        never under fake tensors or a dispatch mode. To a view, such as the transposed gradient of a linear
        layer's weights, it does not: the view's base refers to the storage too. Such a sum is a storage of
        its own while it is computed. Source: torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace.
        """
        log = self.log
        total = len(log.kinds) - 1
        if is_of_view:
            log.kinds[total] = TensorKind.SUM
            log.note(Event.FREE, total)
        else:
            columns = (log.kinds, log.num_bytes, log.modules, log.operators, log.codes, log.arguments)
            for column in (*columns, log.streams) if log.streams else columns:
                column.pop()
        self._live[key] = (self._live[key][0], into)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record it."""
        if self.is_in_engine and function.__name__ in _INTO_ZEROS and self._is_newborn(args[0]):
            function = getattr(self._torch.ops.aten, _INTO_ZEROS[function.__name__]).default
        from_parts = on_parts(function, args, self.call)
        if from_parts is not None:
            return from_parts
        operator = self._operator_number(function)
        if operator_is_item(function) and is_fake(args[0]) and args[0].constant is None:
            self._count(operator, function, args, kwargs, None, [])
            return self._item(args[0])
        if function.__name__ in _INDEXED_BY_MASKS:
            args = (args[0], self._by_numbers(args[1]), *args[2:])
        is_sum = self._is_engine_sum(function, args)
        place = self._place()
        out = self._read(function, args, kwargs) if self._known.reads(function, args) else None
        if out is None:
            out = function(*args, **kwargs)
        outputs = [tensor for _, tensor in leaves(out) if isinstance(tensor, self._torch.Tensor)]
        if not self.is_in_engine:
            self._known.follow(function, args, kwargs, outputs)
        self._count(operator, function, args, kwargs, out, outputs)
        born = None
        for position, tensor in enumerate(outputs):
            if function.is_view and (tensor.shape != args[0].shape or args[0] in self._views):
                self._views[tensor] = None  # one of the same shape is the tracer's own, for its hooks
            if is_sparse(tensor):  # its parts were allocated before it
                continue
            storage = tensor.untyped_storage()
            num_bytes = stored_bytes(function, position, tensor) if self._as_on_cuda else storage.nbytes()
            index = self._adopt(storage, num_bytes, operator, place)
            born = index if index is not None else born
            if index is not None and not tensor.dtype.is_floating_point:
                self._follow(index, args)
            elif index is not None and function.__name__ == "rand.default":
                self._from_chance.add(index)
        if is_sum and born is not None:
            self._expect_merge(args[0], outputs[0])
        if self._as_on_cuda:
            self._take_scratch(function, args, operator, place)
        return out

    def _read(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operator returns that reads values; None if these are unknown."""
        found = self._known.answer(function, args, kwargs)
        if function.__name__ != "nonzero.default":
            return found
        size = [args[0].numel(), args[0].dim()]
        if found is not None and (not self._is_unknown(args[0]) or 2 * len(found) < size[0]):
            return found
        # Ignored labels and padding are unknown, so all elements count: an upper bound.
        return self._torch.ops.aten.new_empty.default(args[0], size, dtype=self._torch.int64)

    def _operator_number(self, function: Any) -> int:
        """Return the number of an operator, or of another kernel or call by its name."""
        number = self._operators.setdefault(function, len(self._operators))
        if number == len(self.log.operator_names):
            self.log.operator_names.append(str(function))
        return number

    def note_kernel(self, *args: Any, flops: int = 0, **kwargs: Any) -> None:
        """Record a kernel that no operator stands for, as if it read or wrote each of its tensors once."""
        tensors = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, self._torch.Tensor)]
        self._note_call(
            self._book.kernel(self._operator_number("triton.kernel"), tensors, flops, self._pass())
        )

    def _is_newborn(self, tensor: Any) -> bool:
        """Return True if the last event is the allocation of a tensor's storage."""
        last = self.log.codes[-1:], self.log.arguments[-1:]
        return last == ([Event.ALLOCATE], [self.index_of(tensor)])

    def _by_numbers(self, indices: Any) -> Any:
        """Return the indices with masks of unknown values converted as by nonzero(), as kernels do.

        Source: aten/src/ATen/native/IndexingUtils.h, expandTensors.
        """
        found: list[Any] = []
        for index in indices:
            if index is not None and index.dtype is self._torch.bool and is_fake(index):
                places = self.call(self._torch.ops.aten.nonzero.default, (index,), {})
                found += self.call(self._torch.ops.aten.unbind.int, (places, 1), {})
            else:
                found.append(index)
        return found

    def _take_scratch(self, function: Any, args: tuple[Any, ...], operator: int, place: int) -> None:
        taken = [
            self._bear(num_bytes, TensorKind.WORKSPACE, operator, place)
            for num_bytes in scratch_bytes(function, args)
        ]
        for index in reversed(taken):
            self.log.note(Event.FREE, index)

    def _is_engine_sum(self, function: Any, args: tuple[Any, ...]) -> bool:
        """Return True if autograd adds two gradients of one tensor.

        PyTorch's formulas of first derivatives never add two tensors of the same shape themselves.
        """
        return (
            function is self._torch.ops.aten.add.Tensor
            and self.is_in_engine
            and isinstance(args[1], self._torch.Tensor)
            and args[0].shape == args[1].shape
        )

    def _expect_merge(self, summand: Any, total: Any) -> None:
        index = self.index_of(summand)
        if index is not None and summand.dtype == total.dtype and is_dense(summand):
            key = total.untyped_storage()._cdata
            self._sum = (len(self.log.codes), index, key, summand in self._views)

    def _count(
        self, operator: int, function: Any, args: Any, kwargs: Any, out: Any, outputs: list[Any]
    ) -> None:
        if self._counts:
            self._note_call(self._book.call(operator, function, args, kwargs, out, outputs, self._pass()))

    def _pass(self) -> Pass:
        if not self.is_in_backward:
            return Pass.FORWARD
        return Pass.BACKWARD if self.is_in_engine else Pass.RECOMPUTATION

    def _note_call(self, call: OperatorCall[int] | None) -> None:
        if call is not None:
            self.log.note(CALL, len(self.log.calls))
            self.log.calls.append(call)

    def _is_unknown(self, tensor: Any) -> bool:
        """Return True if a fake tensor was computed from the labels or the mask."""
        return is_fake(tensor) and self.index_of(tensor) in self._from_labels | self._from_mask

    def _follow(self, index: int, args: tuple[Any, ...]) -> None:
        """Mark integer and boolean tensors computed from the mask, the labels or random numbers."""
        sources = {self.index_of(leaf) for _, leaf in leaves(args) if isinstance(leaf, self._torch.Tensor)}
        for known in (self._from_mask, self._from_labels, self._from_chance):
            if sources & known:
                known.add(index)

    def _item(self, tensor: Any) -> Any:
        """Return a fake tensor's value; if it is unknown, one for the control flow that reads it."""
        if (value := self._known.item(tensor)) is not None:
            return value
        if tensor.dtype is not self._torch.bool:
            return 1.0 if tensor.dtype.is_floating_point else 1
        index = self.index_of(tensor)
        if index in self._from_chance:
            return False  # no layer is dropped (layerdrop), which gives the maximum
        if index not in self._from_mask:
            return True
        asks_for_padding = self.log.operator_names[self.log.operators[index]].startswith(
            ("aten.any", "aten.ne")
        )
        return self._is_padded == asks_for_padding


def operator_is_item(function: Any) -> bool:
    """Return True if an operator reads one element into Python."""
    return bool(function.__name__ == "_local_scalar_dense.default")


def is_dense(tensor: Any) -> bool:
    """Return True if a tensor's elements are contiguous in memory, without overlap."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != size:
                return False
            size *= length
    return True


def watching(recorder: Recorder) -> Any:
    """Return the dispatch mode that passes every operator to a recorder."""
    from torch import _C, ops
    from torch.utils._python_dispatch import TorchDispatchMode

    device = ops.prim.device.default
    not_overridden = _C.DisableTorchFunction

    class Watching(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is device:
                return known_device(args[0]) or func(*args)
            with not_overridden():  # cuda_like() is on in the backward pass, and slows each look at a tensor
                return recorder.call(func, args, kwargs or {})

    return Watching()
