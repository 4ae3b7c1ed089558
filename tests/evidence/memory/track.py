"""Tracker: every tensor storage of this process, from allocation to free, with the line that allocated it."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAMED = ("deepspeed/", "accelerate/", "transformers/", "torch/optim/", "torch/nn/parallel/")
"""Packages whose lines name a storage: the innermost frame in one of them."""
_PASSED_OVER = (
    "deepspeed/utils/",
    "deepspeed/comm/",
    "deepspeed/accelerator/",
    "accelerate/utils/operations",
)
_BACKWARD = "torch/autograd/graph.py"
_BEFORE_TRAINING = ("load", "initialise")
_PASSING = ("model", "backward")
"""Kinds that are freed by the end of the backward pass: the activations."""


@dataclass(slots=True)
class Born:
    """One storage."""

    nbytes: int
    site: str
    """package/file.py:line function, or "autograd"."""
    on_device: bool
    pinned: bool
    role: str = ""
    """"weight" of what the model's code made before training, "gradient" of parameters' gradients."""

    @property
    def kind(self) -> str:
        """weight, gradient, engine, optimizer, model (allocated in its forward) or backward."""
        if self.site.startswith("deepspeed/") and "zero/linear.py" not in self.site:
            return "engine"
        if self.site.startswith("torch/optim/"):
            return "optimizer"
        if self.site.startswith("torch/nn/parallel/"):
            return "engine"
        return self.role or ("backward" if self.site == "autograd" else "model")


@dataclass(slots=True)
class Phase:
    """Allocations and frees of one phase."""

    name: str
    events: list[tuple[int, Born]] = field(default_factory=list)
    """(+1 or -1, storage), in their order."""
    cyclic_bytes: int = 0
    """Device bytes that only the garbage collector freed, at the end of the phase."""


class Tracker(TorchDispatchMode):
    """Tracks storages while it is entered; `phase` begins a phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[Phase] = [Phase("before")]
        self._live: dict[int, tuple[Born, weakref.ref[Any]]] = {}
        self._forced: tuple[bool, bool] | None = None
        self.default_on_device = False

    def phase(self, name: str) -> None:
        """End the current phase and begin another."""
        phase = self.phases[-1]
        before = len(phase.events)
        gc.collect()
        phase.cyclic_bytes = sum(born.nbytes for sign, born in phase.events[before:] if born.on_device)
        self.phases.append(Phase(name))

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor lives on the device."""
        born = self._born(tensor)
        return born is not None and born.on_device

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor lives in page-locked host memory."""
        born = self._born(tensor)
        return born is not None and born.pinned

    def mark_gradient(self, tensor: torch.Tensor | None) -> None:
        """Mark a tensor as a parameter's gradient."""
        if tensor is not None and (born := self._born(tensor)):
            born.role = "gradient"

    def live(self) -> list[Born]:
        """Return the live storages."""
        return [born for born, _ in self._live.values()]

    @contextlib.contextmanager
    def born_on(self, *, device: bool, pinned: bool = False) -> Iterator[None]:
        """Set where tensors allocated inside live."""
        before, self._forced = self._forced, (device, pinned)
        try:
            yield
        finally:
            self._forced = before

    def _born(self, tensor: torch.Tensor) -> Born | None:
        try:
            entry = self._live.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # has no storage
            return None
        return entry[0] if entry else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(_tensors((args, kwargs)))
        for tensor in inputs:
            self._see(tensor, None)
        result = func(*args, **kwargs)
        place = None
        for tensor in _tensors(result):
            if place is None:
                place = self._place(func, kwargs.get("device"), inputs)
            self._see(tensor, place)
        return result

    def _place(self, func: Any, named: Any, inputs: list[torch.Tensor]) -> tuple[bool, bool]:
        if self._forced is not None:
            return self._forced
        if func is torch.ops.aten._to_copy.default and named is not None and named.index is None:
            named = None  # torch's own casts, as in softmax and backward, name what it takes for the device
        if named is not None and (named.index == 0 or not self.default_on_device):
            return named.index == 0, False
        known = [born for tensor in inputs if tensor.dim() and (born := self._born(tensor))]
        known = known or [born for tensor in inputs if (born := self._born(tensor))]
        return any(born.on_device for born in known) if known else self.default_on_device, False

    def _see(self, tensor: torch.Tensor, place: tuple[bool, bool] | None) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key, nbytes = storage._cdata, storage.nbytes()
        entry = self._live.get(key)
        if entry is not None:
            if entry[0].nbytes != nbytes:
                self._grow(key, nbytes)
            return
        if storage.device.type != "cpu":
            return
        on_device, pinned = place or (self.default_on_device, False)
        role = "weight" if self.phases[-1].name in _BEFORE_TRAINING else ""
        born = Born(nbytes, _site(), on_device, pinned, role)
        self._live[key] = born, weakref.ref(storage, lambda _, key=key: self._died(key))
        self.phases[-1].events.append((1, born))

    def _grow(self, key: int, nbytes: int) -> None:
        born, reference = self._live[key]
        now = Born(nbytes, born.site, born.on_device, born.pinned, born.role)
        self.phases[-1].events += [(-1, born), (1, now)]
        self._live[key] = now, reference

    def _died(self, key: int) -> None:
        born, _ = self._live.pop(key)
        self.phases[-1].events.append((-1, born))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _site() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "site-packages/" in path:
            inside = path.rpartition("site-packages/")[2]
            if inside.startswith(_BACKWARD):
                return "autograd"
            if inside.startswith(_NAMED) and not inside.startswith(_PASSED_OVER):
                return f"{inside}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "script"


def summary(phases: list[Phase], *, top: int = 12) -> list[dict[str, Any]]:
    """Return peak and end of every phase, for device and host, with what was there at the peak.

    `peak_of_states` is the largest sum of all that is no activation, at its own moment.
    """
    found = []
    now: dict[bool, Counter[tuple[str, str]]] = {True: Counter(), False: Counter()}
    for phase in phases:
        entry: dict[str, Any] = {"phase": phase.name}
        if phase.cyclic_bytes:
            entry["cyclic_bytes"] = phase.cyclic_bytes
        for on_device, memory in ((True, "device"), (False, "host")):
            entry[memory] = _replay(phase, now[on_device], on_device=on_device, top=top)
        found.append(entry)
    return found


def _replay(phase: Phase, live: Counter[tuple[str, str]], *, on_device: bool, top: int) -> dict[str, Any]:
    total = sum(live.values())
    start = peak = total
    at_peak, stale = dict(live), False
    states = peak_states = _states(live)
    for sign, born in phase.events:
        if born.on_device is not on_device:
            continue
        total += sign * born.nbytes
        live[born.kind, born.site] += sign * born.nbytes
        if born.kind not in _PASSING:
            states += sign * born.nbytes
            peak_states = max(peak_states, states)
        if total > peak:
            peak, stale = total, True
        elif stale and sign < 0:  # the moment before this event was the highest so far
            at_peak, stale = {**live, (born.kind, born.site): live[born.kind, born.site] + born.nbytes}, False
    if stale:
        at_peak = dict(live)
    kinds: Counter[str] = Counter()
    sites: Counter[str] = Counter()
    for (kind, site), nbytes in at_peak.items():
        kinds[kind] += nbytes
        if kind not in _PASSING:
            sites[f"{kind} | {site}"] += nbytes
    end_kinds: Counter[str] = Counter()
    for (kind, _), nbytes in live.items():
        end_kinds[kind] += nbytes
    return {
        "start": start,
        "peak": peak,
        "end": total,
        "peak_of_states": peak_states,
        "kinds_at_peak": {kind: nbytes for kind, nbytes in kinds.most_common() if nbytes},
        "kinds_at_end": {kind: nbytes for kind, nbytes in end_kinds.most_common() if nbytes},
        "sites_at_peak": {site: nbytes for site, nbytes in sites.most_common(top) if nbytes},
    }


def _states(live: Counter[tuple[str, str]]) -> int:
    return sum(nbytes for (kind, _), nbytes in live.items() if kind not in _PASSING)
