"""Entry of the tracer: a model's logs for a request, from runs on fake tensors at several sizes."""

from __future__ import annotations

import copy
import logging
import os
import traceback
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import Save, Trace, TracedParameter
from zerofit.core.errors import UserError
from zerofit.models.dimensions import check_sequence_length
from zerofit.models.meta_device import transformers_config
from zerofit.models.trace.affine import difference, exact, fit, peak_bytes, scaled, to_allocation_log
from zerofit.models.trace.alone import trace_alone
from zerofit.models.trace.attention import flash_package
from zerofit.models.trace.cache import kept_trace, key_of
from zerofit.models.trace.fsdp2 import ShardedModel, ShardedRuns, as_rank_0, saved_whole
from zerofit.models.trace.images import image_of
from zerofit.models.trace.layer_parts import cut_layers
from zerofit.models.trace.layers import find_stacks, shortened
from zerofit.models.trace.liger import heads_read_by_losses
from zerofit.models.trace.packed import is_packed
from zerofit.models.trace.parts import Absent, as_one_rank
from zerofit.models.trace.prepare import prepare_model
from zerofit.models.trace.raw import Skeleton
from zerofit.models.trace.replicate import NotPeriodicError, replicate
from zerofit.models.trace.run import collated, run_micro_batch, run_sharded_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zerofit.core.allocation_log import AllocationLog, FusedKernel, TraceRequest
    from zerofit.models.source import ModelSource
    from zerofit.models.trace.affine import AffineLog
    from zerofit.models.trace.layers import Stack
    from zerofit.models.trace.raw import RawLog
    from zerofit.models.trace.run import Feed
    from zerofit.models.trace.script_loss import ScriptLoss

_ZEROFIT = Path(__file__).parents[2]
_STARTS = (2, 4, 8, 16, 32)
"""Sizes from which a log is assumed to be affine and tested; smaller sizes get separate logs."""
_SCALED_WITHIN = 0.01
"""How far the peak of a scaled log may be from that of a run. ASSUMPTION: far within the ± of a plan."""


_traced_in: set[int] = set()
"""Processes that have traced."""


def has_traced() -> bool:
    """Return True if this process, rather than one that it is a fork of, has run a model."""
    return os.getpid() in _traced_in


def trace_model(
    source: ModelSource,
    request: TraceRequest,
    *,
    cache_folder: Path | None,
    on_progress: Callable[[str], None] | None = None,
) -> Trace:
    """Return the allocations and computation of a model's micro-batch, as functions of its size.

    The model's own class runs forward and backward on tensors with shapes but no values, with CUDA's kernels
    substituted for the CPU's. Mixtures of experts run as grouped matrix products, whose sizes do not depend
    on routing. A cached trace is read without importing torch.

    Args:
        source: output of probe_model.
        cache_folder: the folder of traces (see default_cache_folder); None disables the cache.

    Raises:
        UserError: the model can't run on such tensors, or not with this request.
    """
    check_sequence_length(source.facts, request.sequence_length, request.target_length)
    path = None if cache_folder is None else cached_at(cache_folder, source, request)

    def make() -> Trace:
        if request.sharding is not None:
            return trace_alone(source, request)
        return trace_here(source, request, on_progress=on_progress)

    return kept_trace(path, request, make)


def cached_at(cache_folder: Path, source: ModelSource, request: TraceRequest) -> Path:
    """Return the file of a trace in a folder of traces."""
    return cache_folder / f"{key_of(source, request)}.trace"


def trace_here(
    source: ModelSource, request: TraceRequest, *, on_progress: Callable[[str], None] | None = None
) -> Trace:
    """Return the logs of a model, made in this process."""
    import transformers

    config = transformers_config(source, trust_remote_code=source.trust_remote_code)
    auto_class: Any = getattr(transformers, source.task.auto_class)
    build = partial(auto_class.from_config, trust_remote_code=source.trust_remote_code)
    return trace_config(config, build, request, on_progress=on_progress)


def trace_config(
    config: Any,
    build: Callable[..., Any],
    request: TraceRequest,
    *,
    all_layers: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Trace:
    """Return the logs for a model configuration, as trace_made does.

    Args:
        build: creates the model with its task head from a configuration, a dtype and an
            attn_implementation: from_config of an Auto class, or _from_config of the model's own.
    """
    return trace_made(
        lambda: prepare_model(build, copy.deepcopy(config), request),
        collated,
        request,
        name=config.model_type,
        all_layers=all_layers,
        on_progress=on_progress,
    )


def trace_made(
    make_model: Callable[[], Any],
    feed: Feed,
    request: TraceRequest,
    *,
    name: str,
    attention: str | None = None,
    loss: ScriptLoss | None = None,
    all_layers: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Trace:
    """Return the logs of a model created by a function.

    Args:
        make_model: creates the model on fake tensors, as requested.
        name: of the model, for messages.
        attention: the model's own implementation, used if the request names none.
        loss: computes the loss, if the model alone does not.
        all_layers: whether every layer must run, without replication.

    Raises:
        UserError: the model can't run on fake tensors, or not with this request. Errors of zerofit's own
            code are passed on unchanged.
    """
    _traced_in.add(os.getpid())
    requested = replace(request, attention=request.attention or attention)
    with as_rank_0(request) as mesh, on_fake_tensors(name, requested):
        model = make_model()
        if request.tensor_parallel_size > 1:
            cut_layers(model, Absent(request.tensor_parallel_size))
        if request.pipeline_parallel_size > 1:
            from zerofit.models.changes.stages import keep_stages  # imports torch

            keep_stages(model, request.pipeline_place, request.pipeline_parallel_size, request.stage_blocks)

        def run(skeleton: Skeleton, samples: int) -> RawLog[int]:
            return run_micro_batch(model, skeleton, samples, request, feed=feed, loss=loss)

        if mesh is not None:
            runs = ShardedRuns(
                model, mesh, request, partial(run_sharded_step, request=request, feed=feed, loss=loss)
            )
            run = runs.run
        with as_one_rank(model, request):
            tracing = Tracing(model, request, run, on_progress or (lambda _: None))
            trace = tracing.trace(all_layers=all_layers)
        if mesh is None:
            return trace
        sharded = runs.shard(model)
        save = saved_whole(sharded) if request.sharding and request.sharding.saves_whole else Save()
        return replace(trace, logs=tuple(with_shards(log, sharded, save=save) for log in trace.logs))


def with_shards(log: AllocationLog, sharded: ShardedModel, *, save: Save | None = None) -> AllocationLog:
    """Return a log with what rank 0 holds of the whole model, and what a full state dict allocates.

    Args:
        save: of the same model; None to gather it.
    """
    shards = sharded.shards()
    of_parameters = tuple(shards[parameter.name] for parameter in log.parameters)
    return replace(log, shards=of_parameters, save=saved_whole(sharded) if save is None else save)


@contextmanager
def on_fake_tensors(name: str, request: TraceRequest) -> Iterator[None]:
    """Make tensors inside have shapes but no values.

    Args:
        name: of the model, for messages.

    Raises:
        UserError: code inside fails on such tensors. Errors of zerofit's own code are passed on unchanged.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with _quiet(), flash_package(request), FakeTensorMode(allow_non_fake_inputs=True):
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if _is_own(error):
                raise
            raise _cannot_trace(name, error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the libraries' messages: failures are reported in one error."""
    names = ("torch._subclasses.fake_tensor", "transformers")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _is_own(error: Exception) -> bool:
    """Return True if an error was raised by zerofit's own code rather than the model's or a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(_ZEROFIT)


def _cannot_trace(name: str, error: Exception) -> UserError:
    message = (str(error).strip().splitlines() or [""])[0]
    return UserError(
        "trace-failed",
        "the model can't run on fake tensors",
        found=f"{name}: {type(error).__name__}: {message[:200]}",
        why="memory is measured on a traced run on tensors without values",
        fix="plan with --fast, which only uses the model's dimensions",
    )


def describe(model: Any, kernels: Iterable[FusedKernel] = ()) -> Skeleton:
    """Return a model's modules, parameters and buffers.

    Args:
        kernels: what runs in its place; see heads_read_by_losses.
    """
    import torch

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    numbers = {name: number for number, name in enumerate(names.values())}
    read_by = heads_read_by_losses(model, kernels)
    holders: dict[str, int] = {}
    embeddings: set[str] = set()
    packed: set[str] = set()
    modules, held = [], []
    for index, (path, module) in enumerate(model.named_modules()):
        own = [names[id(parameter)] for parameter in module._parameters.values() if parameter is not None]
        for name in own:
            holders.setdefault(name, index)
        if isinstance(module, torch.nn.Embedding):
            embeddings.update(own)
        if is_packed(module):
            packed.add(names[id(module.weight)])
        if path in read_by:
            own.append(names[id(read_by[path])])
        modules.append(path)
        held.append(tuple(numbers[name] for name in own))
    parameters = tuple(
        TracedParameter(
            name=name,
            num_elements=parameter.numel(),
            bytes_per_element=parameter.element_size(),
            trains=parameter.requires_grad,
            module=holders[name],
            shape=tuple(parameter.shape),
            is_embedding=name in embeddings,
            is_packed=name in packed or not parameter.dtype.is_floating_point,
        )
        for name, parameter in model.named_parameters()
    )
    return Skeleton(
        modules=tuple(modules),
        module_parameters=tuple(held),
        parameters=parameters,
        buffer_bytes=tuple(buffer.untyped_storage().nbytes() for buffer in model.buffers()),
    )


@dataclass(slots=True)
class Tracing:
    """Runs one model at several sizes, with few or all of its layers."""

    model: Any
    request: TraceRequest
    run: Callable[[Skeleton, int], RawLog[int]]
    """Records the model with a number of samples; some of its layers may be missing."""
    say: Callable[[str], None]
    skeleton: Skeleton = field(init=False)
    stacks: tuple[Stack, ...] = ()
    is_scaled: bool = False
    """True if the model's events depend on the number of samples, so that its log has only the same sums."""
    runs: dict[tuple[int, tuple[int, ...]], RawLog[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.skeleton = describe(self.model, self.request.kernels)

    def trace(self, *, all_layers: bool) -> Trace:
        """Return the logs of the whole model."""
        # FSDP2 gathers the weights of the next layer, so that those beside other units differ.
        shifts = (0, 1) if self.request.sharding is None else (1, 2)
        for shift in () if all_layers else shifts:
            self.stacks = find_stacks(self.model, shift)
            if not self.stacks:
                break
            try:
                return self._logs()
            except UserError:
                raise
            except Exception as reason:  # raised by a model that needs all its layers
                self.model.zero_grad(set_to_none=True)
                self.say(f"layers differ ({reason})")
        self.stacks = ()
        return self._logs()

    def _logs(self) -> Trace:
        start, main = self._affine()
        if self.is_scaled:
            self._check_replication(exact(self._run(start)), start)
        else:
            self._check_replication(main, start + 1)
        whole = self._whole(main)
        if start == _STARTS[0] and self._holds_for_one(main):
            start = 1
        logs = [to_allocation_log(whole, self.skeleton, start)]
        logs += [self._exact(samples) for samples in range(start - 1, 0, -1)]
        return Trace(request=self.request, logs=tuple(logs), notes=self._notes())

    def _notes(self) -> tuple[str, ...]:
        """Return what was assumed of the samples, and what quantization leaves wide."""
        image = image_of(self.model)
        return (*([image.note] if image else []), *self._wide())

    def _wide(self) -> tuple[str, ...]:
        """Return a note if quantization leaves all of the model wide, or most of it."""
        packed = [module for module in self.model.modules() if is_packed(module)]
        if packed:
            return self._wide_experts(sum(module.in_features * module.out_features for module in packed))
        if self.request.quantization is None:
            return ()
        import torch

        linear = {
            type(module).__name__ for module in self.model.modules() if isinstance(module, torch.nn.Linear)
        }
        kinds = ", ".join(sorted(linear - {"Linear"})) or "none"
        return (
            f"{self.request.quantization} quantizes nothing of this model: transformers replaces torch's "
            f"Linear and its own Conv1D, and the model's linear layers are of other classes ({kinds})",
        )

    def _wide_experts(self, num_packed: int) -> tuple[str, ...]:
        """Return a note if experts, stored in one tensor a layer, outweigh what is packed."""
        wide = sum(
            parameter.num_elements
            for parameter in self.skeleton.parameters
            if len(parameter.shape) == 3 and not parameter.is_packed and not parameter.trains
        )
        if wide <= num_packed:
            return ()
        return (
            f"{wide:,} weights of experts count as wide as before quantization, and {num_packed:,} weights "
            "are packed: transformers 5 stores a layer's experts in one tensor, which is no linear layer",
        )

    def _holds_for_one(self, log: AffineLog) -> bool:
        """Return True if a log also holds for one sample, or the model can't run with one."""
        try:
            return difference(log, self._run(1), 1) is None
        except ValueError:  # raised by torch.nn.functional.batch_norm with a single value per channel
            return True

    def _affine(self) -> tuple[int, AffineLog]:
        """Return the smallest size from which a single log holds, and that log."""
        self.is_scaled = False
        for start in _STARTS:
            far = 4 * start + 1
            log = fit(self._run(start), self._run(far), (start, far))
            if log is not None and self._holds_at(log, start + 1):
                return start, log
            if start >= self._least_scaled(far) and (rough := self._scaled(start, far)) is not None:
                return start, rough
        raise UserError(
            "trace-not-affine",
            "this model's memory is not an affine function of the micro-batch size",
            found=f"{type(self.model).__name__}, up to {4 * _STARTS[-1] + 1} samples",
            why="the model is traced at a few sizes, and extrapolated to all others",
            fix="plan with --fast, which only uses the model's dimensions",
        )

    def _least_scaled(self, far: int) -> int:
        """Return the size from which a log may be scaled, rather than tried at larger sizes."""
        is_loop = len(self._run(_STARTS[0]).kinds) != len(self._run(4 * _STARTS[0] + 1).kinds)
        return _STARTS[1] if is_loop else _STARTS[2]

    def _scaled(self, start: int, far: int) -> AffineLog | None:
        """Return a log with the sums of two runs, if it has the peak of a third one; else None."""
        log, between = scaled(self._run(start), self._run(far), (start, far)), 2 * start + 1
        found, wanted = peak_bytes(log, between), peak_bytes(exact(self._run(between)), between)
        self.is_scaled = abs(found - wanted) <= _SCALED_WITHIN * wanted
        return log if self.is_scaled else None

    def _holds_at(self, log: AffineLog, samples: int) -> bool:
        """Return True if a log holds at a size: with one more layer, which checks its replication too."""
        if self.stacks and self._difference_of_longer(log, samples) is None:
            return True
        return difference(log, self._run(samples), samples) is None

    def _exact(self, samples: int) -> AllocationLog:
        return to_allocation_log(self._whole(exact(self._run(samples))), self.skeleton, samples)

    def _run(self, samples: int, more: int = 0) -> RawLog[int]:
        key = (samples, tuple(stack.few(more) for stack in self.stacks))
        if key not in self.runs:
            few = "".join(f", {stack.few(more)} of {stack.num_layers} layers" for stack in self.stacks)
            self.say(f"micro-batch {samples}{few}")
            with shortened(self.model, self.stacks, more):
                self.runs[key] = self.run(self.skeleton, samples)
        return self.runs[key]

    def _check_replication(self, log: AffineLog, samples: int) -> None:
        """Compare a log with one more period of layers with a run of them, at one micro-batch size for all.

        Raises:
            NotPeriodicError: they differ.
        """
        seen = self._difference_of_longer(log, samples) if self.stacks else None
        if seen is not None:
            raise NotPeriodicError(seen)

    def _whole(self, log: AffineLog) -> AffineLog:
        """Return the log of all layers."""
        return self._grown(log, [(stack.num_layers - stack.few()) // stack.period for stack in self.stacks])

    def _difference_of_longer(self, log: AffineLog, samples: int) -> str | None:
        """Return where a log with one more period of layers differs from a run of them, or None."""
        try:
            longer = self._grown(log, [1] * len(self.stacks))
        except NotPeriodicError as error:
            return str(error)
        return difference(longer, self._run(samples, more=1), samples)

    def _grown(self, log: AffineLog, copies: list[int]) -> AffineLog:
        for stack, more in zip(self.stacks, copies, strict=True):
            log = replicate(log, self.skeleton, stack, num_layers=stack.few(), copies=more)
        return log
