"""Limits the memory of a rank: a stand-in for a GPU's, on the CPU, by torch's own error.

On the path of a process, it raises torch.OutOfMemoryError, in the words of torch's CUDA allocator, where the
storages that live would exceed a limit. MEMORY_LIMIT holds its bytes, the phase in which it holds or "all",
and the steps that a first attempt does before it holds: "1048576 forward 5". "99% forward 5" is that share of
what the phase takes in those steps, on the rank that has the most, and is kept for later attempts in the
folder that MEMORY_LIMITS names. With a fourth word, "once", it holds in the first attempt alone: host and
device are one memory here, so no offload would make room.
"""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import Any

_WORDS = (
    "CUDA out of memory. Tried to allocate {asked:.2f} MiB. GPU 0 has a total capacity of {limit:.2f} MiB of "
    "which {free:.2f} MiB is free. Including non-PyTorch memory, this process has {live:.2f} MiB in use. "
    "Of the allocated memory {live:.2f} MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
    "unallocated."
)
_MIB = 1 << 20


def limit_memory(_: Any) -> None:
    """Count what lives from here on."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from zerofit.training.reporting import observe

    limit, only, begin, *once = os.environ["MEMORY_LIMIT"].split()
    is_first = not any("/recovery-" in word for word in sys.orig_argv)
    if not is_first and once:
        return
    share = float(limit[:-1]) / 100 if limit.endswith("%") else 0.0
    folder = Path(os.environ.get("MEMORY_LIMITS", "."))
    after = int(begin) if is_first else 0

    class LimitedMemory(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}
            self.total = 0
            self.peak = 0
            """Of the phase, in the steps before the limit holds."""
            self.limit: int | None = None if share else int(limit)

        def free(self, key: int) -> None:
            self.total -= self.alive.pop(key)[1]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for one in tree_leaves(result):
                if isinstance(one, torch.Tensor) and one.device.type == "cpu" and one.layout is torch.strided:
                    self.see(one.untyped_storage())
            return result

        def see(self, storage: Any) -> None:
            key, num_bytes = storage._cdata, storage.nbytes()
            if key in self.alive:
                return
            self.alive[key] = weakref.ref(storage, lambda _: self.free(key)), num_bytes
            self.total += num_bytes
            rank = observe._observed
            phase = "" if rank is None else rank.phase.name.lower()
            if only not in ("all", phase):
                return
            if rank is not None and rank.step < after:
                self.peak = max(self.peak, self.total)
                return
            if self.limit is None and is_first:
                assert self.peak, f"{only} allocates nothing, so that no limit is met"
                self.limit = int(share * self.peak)
                (folder / f"rank{os.environ.get('RANK', 0)}").write_text(str(self.limit))
            elif self.limit is None:
                self.limit = max(int(path.read_text()) for path in folder.glob("rank*"))
            if self.total > (most := self.limit):
                live = (self.total - num_bytes) / _MIB
                asked, free = num_bytes / _MIB, max(0, most - self.total + num_bytes) / _MIB
                message = _WORDS.format(asked=asked, limit=most / _MIB, free=free, live=live)
                raise torch.OutOfMemoryError(message)

    LimitedMemory().__enter__()


def _is_rank() -> bool:
    """Return True if this process was started to be a rank, not to launch one."""
    words = sys.orig_argv
    return "-m" in words and words[words.index("-m") + 1] == "zerofit.training.runner"


if _is_rank() and "MEMORY_LIMIT" in os.environ:
    from zerofit.scripts.on_import import when_imported

    when_imported("torch", limit_memory)
