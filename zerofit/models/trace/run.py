"""Runs one micro-batch, forward and backward, under a Recorder."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import Event, TensorKind
from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.core.upstream.transformers import checkpointing_function, set_checkpointing_function
from zerofit.models.changes.quantization import torch_dtype
from zerofit.models.trace.batches import make_batch
from zerofit.models.trace.cuda_like import cuda_like
from zerofit.models.trace.cut_cross_entropy import cut_losses
from zerofit.models.trace.fsdp2 import ShardedRecorder
from zerofit.models.trace.liger import fused_kernels
from zerofit.models.trace.nested import map_tensors, named_tensors
from zerofit.models.trace.parts import received_by_stage
from zerofit.models.trace.prepare import (
    as_if_eager,
    attribute_replaced,
    autocast,
    replaceable_parameters,
    upcast,
)
from zerofit.models.trace.recorder import Recorder, watching
from zerofit.models.trace.recurrent import recurrent_kernels
from zerofit.models.trace.triton_kernels import kernels_skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from zerofit.core.allocation_log import TraceRequest
    from zerofit.models.trace.fsdp2 import ShardedModel
    from zerofit.models.trace.raw import RawLog, Skeleton
    from zerofit.models.trace.script_loss import ScriptLoss

    Batch = tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments of a model's call: positional ones, and those by name."""
    Feed = Callable[[Any, int, TraceRequest], Batch]
    """Makes a batch with a number of samples for a model."""


def collated(model: Any, samples: int, request: TraceRequest) -> Batch:
    """Return the batch that the data collator of a model's task makes."""
    return (), make_batch(model, samples, request)


def run_micro_batch(
    model: Any,
    skeleton: Skeleton,
    samples: int,
    request: TraceRequest,
    *,
    feed: Feed = collated,
    loss: ScriptLoss | None = None,
    as_on_cuda: bool = True,
) -> RawLog[int]:
    """Return the log of one micro-batch, after which the model has no gradients.

    Args:
        model: on fake or real tensors; some of its layers may be missing.
        skeleton: of the whole model, which numbers modules and parameters.
        loss: computes the loss, if the model alone does not.
        as_on_cuda: whether CUDA kernels replace the CPU's.
    """
    others = loss.others if loss else ()
    with recording(model, skeleton, request, others=others, as_on_cuda=as_on_cuda) as recorder:
        kept = None
        if request.evaluates:
            kept = evaluate(model, samples, request, recorder, feed=feed, loss=loss)
        else:
            forward_and_backward(model, samples, request, recorder, feed=feed, loss=loss)
        recorder.close()
        del kept
        model.zero_grad(set_to_none=True)
    return recorder.log


def run_sharded_step(
    sharded: ShardedModel,
    skeleton: Skeleton,
    samples: int,
    request: TraceRequest,
    *,
    feed: Feed = collated,
    loss: ScriptLoss | None = None,
    as_on_cuda: bool = True,
) -> RawLog[int]:
    """Return the log of the micro-batches of one optimizer step under FSDP2, up to the step itself.

    Args:
        sharded: has gathered its weights once before, for which FSDP2 makes what it keeps.
    """
    assert request.sharding is not None
    recorder = ShardedRecorder(is_padded=request.is_padded, as_on_cuda=as_on_cuda, streams=sharded.streams())
    model, last = sharded.model, request.sharding.micro_batches - 1
    others = loss.others if loss else ()
    tensors = [*sharded.own_tensors(), *(tensor for other in others for tensor in _tensors_of(other))]
    held: list[Any] = []
    with (
        recording(model, skeleton, request, recorder=recorder, known=tensors, as_on_cuda=as_on_cuda),
        sharded.recorded_by(recorder),
        _removed(sharded.whole_gradients(recorder)),
    ):
        if request.evaluates:
            recorder.begin_forward()
            held.append(evaluate(model, samples, request, recorder, feed=feed, loss=loss))
        for number in range(0 if request.evaluates else last + 1):
            recorder.begin_forward()
            sharded.sync_gradients(number == last or request.sharding.syncs_each_batch)
            forward_and_backward(model, samples, request, recorder, feed=feed, loss=loss, held=held)
            recorder.end_backward()
        recorder.close()
    return recorder.log


@contextmanager
def _same_draws() -> Iterator[None]:
    """Let a model that draws from numpy, as wav2vec 2.0 does its masks, draw the same in each run."""
    import numpy

    before = numpy.random.get_state()
    numpy.random.seed(0)
    try:
        yield
    finally:
        numpy.random.set_state(before)


def _tensors_of(module: Any) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


@contextmanager
def _removed(handles: Iterable[Any]) -> Iterator[None]:
    """Remove hooks at the end."""
    made = [*handles]
    try:
        yield
    finally:
        for handle in made:
            handle.remove()


@contextmanager
def recording(
    model: Any,
    skeleton: Skeleton,
    request: TraceRequest,
    *,
    recorder: Recorder | None = None,
    known: Iterable[Any] | None = None,
    others: Iterable[Any] = (),
    as_on_cuda: bool,
) -> Iterator[Recorder]:
    """Record what a model does inside.

    Args:
        recorder: None makes one.
        known: tensors that are not recorded; None for the model's and the others'.
        others: more modules, whose weights are no activations either.
        as_on_cuda: whether CUDA kernels replace the CPU's.
    """
    recorder = recorder or Recorder(is_padded=request.is_padded, as_on_cuda=as_on_cuda)
    if known is None:
        known = [tensor for module in (model, *others) for tensor in _tensors_of(module)]
    for tensor in known:
        recorder.ignore(tensor)
    with ExitStack() as stack:
        stack.enter_context(hooked(model, skeleton, recorder, is_sharded=request.sharding is not None))
        stack.enter_context(as_if_eager(request.compute_capability))
        stack.enter_context(replaceable_parameters())  # Switch Transformers casts its router in each pass
        stack.enter_context(_same_draws())
        stack.enter_context(watching(recorder))
        if as_on_cuda:
            stack.enter_context(kernels_skipped(recorder.note_kernel))
            stack.enter_context(cut_losses(recorder.note_kernel))
            stack.enter_context(recurrent_kernels(recorder.note_kernel))
            stack.enter_context(fused_kernels(model, request.kernels, recorder.note_kernel))
            stack.enter_context(cuda_like(request))
            stack.enter_context(saved_on_host(recorder))
        yield recorder


@contextmanager
def saved_on_host(recorder: Recorder) -> Iterator[None]:
    """Let torch's save_on_cpu move tensors off the traced GPU and back, whoever uses it.

    Tensors of a trace are on the CPU, where save_on_cpu would copy them into more of the GPU's memory.
    transformers' and accelerate's offload of checkpointed blocks' inputs use it, and scripts may. Integers
    and masks stay, as their values may decide what runs.
    """
    from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

    def pack(tensor: Any) -> Any:
        return recorder.to_host(tensor) if tensor.is_floating_point() else tensor

    def unpack(tensor: Any) -> Any:
        return recorder.from_host(tensor) if tensor.is_floating_point() else tensor

    def init(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
        saved_tensors_hooks.__init__(self, pack, unpack)

    with attribute_replaced(save_on_cpu, "__init__", init):
        yield


def forward_and_backward(
    model: Any,
    samples: int,
    request: TraceRequest,
    recorder: Recorder,
    *,
    feed: Feed = collated,
    loss: ScriptLoss | None = None,
    held: list[Any] | None = None,
) -> None:
    """Run one micro-batch; the recorder's modes must be active and the model hooked.

    Args:
        held: takes the outputs, where the loop holds them, in place of those of the micro-batch before.
    """
    batch = feed(model, samples, request)
    recorder.know_inputs({name.rpartition(".")[2]: tensor for name, tensor in named_tensors(batch)})
    given = _in_format_of_weights(batch, request)
    in_stages = request.pipeline_parallel_size > 1
    if in_stages:
        with recorder.ignoring():  # the engine counts what stages receive
            given[1]["received"] = received_by_stage(given[1]["input_ids"], model, request)
    recorder.phase = TensorKind.ACTIVATION
    outputs = None
    if loss is not None:
        value = loss.compute(model, given[0][0], request)
    else:
        with autocast(request):
            outputs = model(*given[0], **given[1])
        if request.autocast is not None and not in_stages:
            outputs = upcast(outputs)
        value = _loss(outputs)
        _tag_outputs(outputs, recorder)
        if held is not None:
            held[:] = [outputs] if request.keeps_outputs else []
        if not request.keeps_outputs:
            outputs = None
    recorder.begin_backward()
    _backward(value, recorder.ignoring() if in_stages else nullcontext())
    if request.keeps_outputs:
        recorder.retag_what_outlives_the_backward_pass()
    del batch, given, outputs, value


def evaluate(
    model: Any,
    samples: int,
    request: TraceRequest,
    recorder: Recorder,
    *,
    feed: Feed,
    loss: ScriptLoss | None,
) -> Any:
    """Run a Trainer's evaluation of one batch as its loss's stand-in does, and return what it keeps of it.

    The recorder's modes must be active and the model hooked.
    """
    import torch

    assert loss is not None
    batch = feed(model, samples, request)
    recorder.know_inputs({name.rpartition(".")[2]: tensor for name, tensor in named_tensors(batch)})
    given = _in_format_of_weights(batch, request)
    recorder.phase = TensorKind.ACTIVATION
    with torch.no_grad():
        kept = loss.predict(model, given[0][0], request)
    for _, tensor in named_tensors(kept):
        recorder.retag(tensor, TensorKind.KEPT)
    return kept


def _tag_outputs(outputs: Any, recorder: Recorder) -> None:
    for _, tensor in named_tensors(outputs):
        recorder.retag(tensor, TensorKind.OUTPUT)


def _backward(loss: Any, making: AbstractContextManager[None]) -> None:
    """Do what loss.backward() does, without leaving the active modes, which recomputation needs.

    Args:
        making: around the making of the loss's own gradient, or of hidden states'.
    """
    import torch
    from torch.autograd.graph import _engine_run_backward

    with torch.no_grad(), making:
        gradient = torch.ones_like(loss)
    _engine_run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _in_format_of_weights(batch: Batch, request: TraceRequest) -> Batch:
    """Return the batch with its floats in the weights' dtype, as DeepSpeed's engine casts them."""
    if request.weights is Precision.FP32 or request.autocast is not None or request.sharding is not None:
        return batch
    dtype = torch_dtype(request.weights)
    cast: Batch = map_tensors(
        batch, lambda _, tensor: tensor.to(dtype) if tensor.dtype.is_floating_point else tensor
    )
    return cast


def _loss(outputs: Any) -> Any:
    """Return the model's own loss; if the script computes it, the mean of the first output instead."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    tensor = next((output for _, output in named_tensors(outputs) if output.requires_grad), None)
    if tensor is None:
        raise UserError(
            "trace-failed",
            "the model returns no tensor for a loss",
            found=f"outputs of {type(outputs).__name__}, none with a gradient",
            why="memory is measured on a traced forward and backward pass",
            fix="plan with --fast, which only uses the model's dimensions",
        )
    return tensor.float().mean() if tensor.dim() else tensor


@contextmanager
def hooked(model: Any, skeleton: Skeleton, recorder: Recorder, *, is_sharded: bool = False) -> Iterator[None]:
    """Add hooks to every module and parameter, and remove them at the end.

    Args:
        is_sharded: True under FSDP2, whose units begin before they gather and end after they reshard.
    """
    numbers = {name: number for number, name in enumerate(skeleton.modules)}
    parameters = {parameter.name: number for number, parameter in enumerate(skeleton.parameters)}
    handles = []
    functions = []
    for name, module in model.named_modules():
        handles += _hook_module(module, numbers[name], recorder, is_sharded=is_sharded)
        function = checkpointing_function(module)
        if function is not None:
            functions.append((module, function))
            set_checkpointing_function(module, _placed(function, numbers[name], recorder))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            handles.append(_hook_parameter(parameter, parameters[name], recorder))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, function in functions:
            set_checkpointing_function(module, function)


def _hook_module(module: Any, number: int, recorder: Recorder, *, is_sharded: bool) -> list[Any]:
    """Hook as DeepSpeed's ZeRO-3 does: before the backward pass on outputs, after it on positional inputs.

    Source: deepspeed/runtime/zero/parameter_offload.py, _register_deepspeed_module.
    """

    def before(_: Any, inputs: tuple[Any, ...]) -> Any:
        recorder.enter(number)
        if recorder.is_in_backward or is_sharded:
            return None  # recomputed: autograd uses the first forward's graph
        return _watch_inputs(inputs, number, recorder)

    def after(_: Any, inputs: Any, output: Any) -> None:
        recorder.leave()
        if not recorder.is_in_backward:
            _watch_outputs(output, number, recorder)

    return [
        module.register_forward_pre_hook(before, prepend=is_sharded),
        module.register_forward_hook(after),
    ]


def _watch_inputs(inputs: tuple[Any, ...], number: int, recorder: Recorder) -> tuple[Any, ...]:
    """Return the inputs as views, whose gradients are only what this module contributes."""
    waiting = 0

    def left(_: Any) -> None:
        nonlocal waiting
        waiting -= 1
        if waiting == 0:
            recorder.log.note(Event.BACKWARD_LEAVE, number)

    def watch(tensor: Any) -> Any:
        nonlocal waiting
        waiting += 1
        view = tensor.view_as(tensor)
        view.register_hook(left)
        return view

    return tuple(watch(tensor) if needs_gradient(tensor) else tensor for tensor in inputs)


def _watch_outputs(output: Any, number: int, recorder: Recorder) -> None:
    is_reached = False

    def reached(_: Any) -> None:
        nonlocal is_reached
        if not is_reached:
            is_reached = True
            recorder.log.note(Event.BACKWARD_ENTER, number)

    for _, tensor in named_tensors(output):
        if needs_gradient(tensor):
            tensor.register_hook(reached)


def needs_gradient(value: Any) -> bool:
    """Return True if a value is a tensor that requires gradients."""
    import torch

    return isinstance(value, torch.Tensor) and value.requires_grad


def _hook_parameter(parameter: Any, number: int, recorder: Recorder) -> Any:
    def ready(parameter: Any) -> None:
        recorder.gradient_ready(number, parameter.grad)

    return parameter.register_post_accumulate_grad_hook(ready)


def _placed(checkpoint: Any, number: int, recorder: Recorder) -> Any:
    """Return a checkpoint function whose recomputation is assigned to its layer."""

    def placed(function: Any, *args: Any, **kwargs: Any) -> Any:
        def again(*given: Any, **more: Any) -> Any:
            if not recorder.is_in_backward:
                return function(*given, **more)
            with recorder.inside(number):
                return function(*given, **more)

        return checkpoint(again, *args, **kwargs)

    return placed
