"""Checks that a forward pass is separable: that its outputs can be joined from those of micro-batches."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.torch import accumulated_hooks
from zerofit.models.pieces import Inputs, taken
from zerofit.training.batch.micro_batches.joiner import (
    Joiner,
    NotJoinableError,
    flat,
    name_of,
    rows_per_sample,
)
from zerofit.training.batch.micro_batches.weights import TORCHS_OWN, weightings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.models.trees import Path

_TOLERANCE_FP32 = 1e-4
"""Relative. ASSUMPTION: kernels for other batch sizes sum in another order, on GPUs in tf32."""
_TOLERANCE_HALF = 2e-2
"""Relative, for 16-bit weights or autocast: two to three of bf16's 8 significant bits. ASSUMPTION."""
_NOISE = 10.0
"""A weighting is rejected if its error is this many times the best one's. ASSUMPTION."""
_NOISE_FLOOR = 1e-6
"""Relative error accepted for all weightings: some sums with fp32's 6e-8."""

_SPREAD = 10.0
"""Standard deviation of the scaled outputs of the last layer. ASSUMPTION: losses of tens differ by tens of
percent, and no dtype overflows."""

_BUFFER_CHECKS = 2
"""Micro-batches after which a model's buffers are compared, since the first may initialize buffers."""

_MIN_HALF = 3
"""Minimum samples per half. ASSUMPTION: from this many on, no tensor has a row per sample by chance."""

HeldWeightings = dict["Path", tuple[str, ...]]
"""The weightings that hold for each scalar output, most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """The samples of a check, which compares all of them with two halves."""

    whole: Inputs
    first: Inputs
    second: Inputs
    size: int
    """Samples of each half; of the whole batch if the check is inconclusive."""
    is_conclusive: bool
    """True if the check is conclusive, which needs more than one sample."""

    @property
    def num_samples(self) -> int:
        """Total number of samples."""
        return 2 * self.size if self.is_conclusive else self.size


def halves_of(inputs: Inputs, *, size: int, at_most: int, can_split: bool, model: Any) -> Halves:
    """Return the most conclusive samples: those with the fewest and with the most labels."""
    if not can_split or size == 1:
        return Halves(whole=inputs, first=inputs, second=inputs, size=size, is_conclusive=False)
    alone = [(taken(inputs, slice(row, row + 1), of=size), 1) for row in range(size)]
    counted = {name: weights for name, weights in weightings(alone, model).items() if len(set(weights)) > 1}
    rows = sorted(range(size), key=lambda row: [weights[row] for weights in counted.values()])
    labelled = [
        row for row in rows if all(weights[row] for name, weights in counted.items() if TORCHS_OWN in name)
    ]
    rows = labelled if len(labelled) > 1 else rows  # sums and means of nothing are inconclusive
    # Both halves together are at most a micro-batch, unless that is too few to identify batch dimensions.
    half = min(max(_MIN_HALF, at_most // 2), at_most, len(rows) // 2)
    low, high = sorted(rows[:half]), sorted(rows[-half:])
    return Halves(
        whole=taken(inputs, low + high, of=size),
        first=taken(inputs, low, of=size),
        second=taken(inputs, high, of=size),
        size=half,
        is_conclusive=True,
    )


def check_separable(
    halves: Halves,
    call: Callable[[Inputs, int, int], Any],
    *,
    model: Any,
    is_half: bool,
    max_over_ranks: Callable[[list[int]], list[int]],
) -> HeldWeightings | None:
    """Return how the scalar outputs must be weighted.

    Runs four or seven forward passes on every rank; the model must be in evaluation mode, without gradients.

    Args:
        halves: the samples.
        call: runs the model on some of them, given the first one's index and their number.
        is_half: whether the model computes in 16 bits.
        max_over_ranks: returns the maximum of each number over all ranks.

    Returns:
        None if these samples are inconclusive: the loss is NaN.
    """
    last_layer = _LastLayer()
    size = halves.size
    second_start = size if halves.is_conclusive else 0
    with last_layer.watched(model):
        _called(call, halves.first, 0, size)

    def outputs() -> tuple[dict[Path, Any], list[dict[Path, Any]]]:
        whole = flat(_called(call, halves.whole, 0, halves.num_samples))
        first = flat(_called(call, halves.first, 0, size))
        return whole, [first, flat(_called(call, halves.second, second_start, size))]

    with last_layer.sharpened():
        whole, parts = outputs()
    if max_over_ranks([int(not any(float(whole[path]) for path in _scalars(whole)))])[0]:
        whole, parts = outputs()  # scaled so much that correct tokens have a loss of 0, which is inconclusive
    weights = weightings([(halves.first, size), (halves.second, size)], model)
    tolerance = _TOLERANCE_HALF if is_half else _TOLERANCE_FP32
    names, scalars = list(weights), _scalars(whole)
    errors = {
        path: [_error(whole[path], [part[path] for part in parts], weights[name]) for name in names]
        for path in scalars
    }
    complaint = _complaint(whole, parts, size, tolerance) if halves.is_conclusive else None
    is_wrong = [
        halves.is_conclusive
        and not (error <= tolerance and error <= _NOISE * min(errors[path]) + _NOISE_FLOOR)
        for path in scalars
        for error in errors[path]
    ]
    is_inconclusive = not halves.is_conclusive or any(not _is_finite(whole[path]) for path in scalars)
    flags = max_over_ranks([*map(int, is_wrong), int(complaint is not None), int(not is_inconclusive)])
    if complaint is not None or flags[-2]:
        raise not_separable(complaint or "another rank's outputs differ")
    if not flags[-1]:
        return None
    found = {}
    for place, path in enumerate(scalars):
        ours = flags[place * len(names) : (place + 1) * len(names)]
        found[path] = tuple(name for name, wrong in zip(names, ours, strict=True) if not wrong)
        if not found[path]:
            raise not_separable(_scalar_complaint(path, whole, parts))
    return found


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Disable dropout and gradients inside.

    Does not call eval(), which does more in some models (loralib's layers merge their weights), or train(),
    which would undo the script's settings of single modules.
    """
    import torch

    before = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in before:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, training in before:
            module.training = training


HOOKING_LIBRARIES = ("deepspeed", "zerofit")
"""Packages whose hooks on accumulated gradients are made for several backward passes a step."""


def not_separable(
    found: str, *, why: str = "the loss of a batch is not the weighted sum of its micro-batches' losses"
) -> UserError:
    """Return the error for a model whose forward pass can't be split."""
    return UserError(
        "forward-not-separable",
        "the model's forward pass can't be split into micro-batches",
        found=found,
        why=why,
        fix="plan with the script's own batch size (--micro-batch-size), or give the script a smaller one",
    )


def _called(call: Callable[[Inputs, int, int], Any], inputs: Inputs, start: int, size: int) -> Any:
    """Return the outputs for some of the samples; a model that fails is not separable."""
    import torch

    try:
        return call(inputs, start, size)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise not_separable(
            f"{type(error).__name__}: {lines[0]}", why="the model fails on some of the batch's samples"
        ) from error


def _scalars(whole: dict[Path, Any]) -> list[Path]:
    import torch

    return [
        path
        for path, leaf in whole.items()
        if torch.is_tensor(leaf) and leaf.dim() == 0 and leaf.is_floating_point()
    ]


def _is_finite(scalar: Any) -> bool:
    return bool(scalar.isfinite())


def _error(whole: Any, parts: list[Any], weights: tuple[float, ...]) -> float:
    """Return the relative error of the weighted sum; 0 if the whole is not finite."""
    if not _is_finite(whole):
        return 0.0
    joined = sum(float(part) * weight for part, weight in zip(parts, weights, strict=True) if weight)
    if joined != joined:
        return float("inf")
    scale = max(abs(float(value)) for value in (whole, *parts) if _is_finite(value))
    return abs(joined - float(whole)) / max(scale, 1e-6)


def _complaint(
    whole: dict[Path, Any], parts: list[dict[Path, Any]], size: int, tolerance: float
) -> str | None:
    """Return how a tensor with a batch dimension differs, or None; the parts' tensors are released.

    Logits of a large vocabulary may be most of a step's memory, so they are not copied to a wider dtype.
    """
    import torch

    sizes = (size, size)
    joiner = Joiner(sizes, lambda _: (0.5, 0.5))
    for path, leaf in whole.items():
        if not torch.is_tensor(leaf) or leaf.dim() == 0 or any(path not in part for part in parts):
            continue
        values = [part.pop(path) for part in parts]
        if rows_per_sample(values, sizes) is None:
            try:
                values = [joiner.join(path, values)]
            except NotJoinableError:
                continue  # refused when the script reads it
        shape = (sum(len(value) for value in values), *values[0].shape[1:])
        if shape != leaf.shape:
            shapes = f"{tuple(leaf.shape)} for {2 * size} samples, and {shape} joined from two halves"
            return f"{name_of(path)} has shape {shapes}"
        if leaf.is_floating_point() and leaf.isfinite().all():
            norm = functools.partial(
                torch.linalg.vector_norm, dtype=torch.promote_types(leaf.dtype, torch.float32)
            )
            places = leaf.split([len(value) for value in values])
            apart = torch.stack([norm(value - place) for value, place in zip(values, places, strict=True)])
            distance = float(norm(apart) / norm(leaf).clamp_min(1e-12))
            if distance > 10 * tolerance:
                return f"{name_of(path)} of {2 * size} samples differs by {distance:.1g} from two halves'"
    return None


def _scalar_complaint(path: Path, whole: dict[Path, Any], parts: list[dict[Path, Any]]) -> str:
    values = " and ".join(f"{float(part[path]):.6g}" for part in parts)
    return f"{name_of(path)} is {float(whole[path]):.6g}, and {values} for its two halves"


class _LastLayer:
    """Scales the outputs of the layer with parameters that runs last.

    An untrained model has nearly the same loss for every token, log(vocabulary size), so that a mean over
    samples can't be distinguished from a mean over tokens. With larger outputs of its last layer losses
    differ.
    """

    def __init__(self) -> None:
        self._factors: dict[Any, float] = {}
        """The factor by layer; empty until a layer's outputs differ."""

    @contextlib.contextmanager
    def watched(self, model: Any) -> Iterator[None]:
        """Record which layer runs last; torch.compile must be off, or it would compile the hooks."""

        def note(layer: Any, _: Any, output: Any) -> None:
            spread = _spread_of(output)
            if spread > 0:
                self._factors = {layer: _SPREAD / spread}

        with _hooked(_layers(model), note):
            yield

    @contextlib.contextmanager
    def sharpened(self) -> Iterator[None]:
        """Scale its outputs by the same factor in every call inside."""
        factors = self._factors
        with _hooked(list(factors), lambda layer, _, output: output * factors[layer]):
            yield


def _layers(model: Any) -> list[Any]:
    from torch.nn import Module

    # A model may have a parameters() of its own, without `recurse`.
    return [layer for layer in model.modules() if any(True for _ in Module.parameters(layer, recurse=False))]


def _spread_of(output: Any) -> float:
    import torch

    if not torch.is_tensor(output) or not output.is_floating_point() or output.numel() < 2:
        return 0.0
    spread = float(output.float().std())
    return spread if spread == spread and spread != float("inf") else 0.0


@contextlib.contextmanager
def _hooked(layers: list[Any], hook: Callable[..., Any]) -> Iterator[None]:
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def refuse_batch_norm(model: Any) -> None:
    """Refuse layers that normalize over all samples of a batch."""
    from torch.nn.modules.batchnorm import _BatchNorm

    mixing = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training
    ]
    if mixing:
        more = f" and {len(mixing) - 1} more" if len(mixing) > 1 else ""
        raise not_separable(
            f"{mixing[0]}{more}", why="batch normalization uses mean and variance of the micro-batch"
        )


def observe_gradient_hooks(model: Any) -> None:
    """Refuse hooks of the script that change gradients, or act once they are accumulated.

    They would see each micro-batch's gradient in place of the batch's: a clamp, or a step in backward(), then
    gives another result. Hooks that only look (a logger's) stay.
    """
    for name, parameter in model.named_parameters():
        for key, hook in tuple((parameter._backward_hooks or {}).items()):
            if not hasattr(hook, "_zerofit_observes"):
                parameter._backward_hooks[key] = _observed(hook, name)
        for hook in accumulated_hooks(parameter):
            if not str(getattr(hook, "__module__", "")).startswith(HOOKING_LIBRARIES):
                raise _hooks_gradients(name, "after it is accumulated")


def _observed(hook: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    def observe(gradient: Any) -> Any:
        changed = hook(gradient)
        if changed is not None:
            raise _hooks_gradients(name, "which changes it")
        return None

    observe._zerofit_observes = True  # type: ignore[attr-defined]
    return observe


def _hooks_gradients(name: str, how: str) -> UserError:
    return not_separable(
        f"a hook on the gradient of {name}, {how}",
        why="it would act on the gradient of each micro-batch in place of the batch's",
    )


class Buffers:
    """Detects training passes that change a model's buffers, such as moving averages and counters.

    They would change once per micro-batch, and again when it is recomputed.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before: dict[str, tuple[Any, int]] = {}
        self._num_looks = 0

    def look(self) -> None:
        """Compare the buffers after the first and the second micro-batch; call it after each."""
        if self._num_looks == _BUFFER_CHECKS:
            return
        self._num_looks += 1
        now = {name: (buffer, _version(buffer)) for name, buffer in self._model.named_buffers()}
        if self._num_looks == _BUFFER_CHECKS:
            changed = [name for name, buffer in now.items() if _is_changed(self._before.get(name), buffer)]
            self._before = {}
            if changed:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                raise not_separable(
                    f"the buffer {changed[0]}{more} changes in each forward pass",
                    why="it would change once per micro-batch instead of once per batch",
                )
        else:
            self._before = now


def _version(buffer: Any) -> int:
    """Return torch's counter of in-place changes."""
    return 0 if buffer.is_inference() else int(buffer._version)


def _is_changed(before: tuple[Any, int] | None, now: tuple[Any, int]) -> bool:
    """Return True if a buffer was changed in place or replaced."""
    import torch

    if before is None:
        return False
    if before[0] is now[0]:
        return before[1] != now[1]
    return before[0].shape != now[0].shape or not torch.equal(before[0], now[0])
