"""Limits the memory of a rank: a stand-in for a GPU's, on the CPU, by torch's own error.

On the path of a process, it raises torch.OutOfMemoryError, in the words of torch's CUDA allocator, where the
storages that live would exceed a limit. MEMORY_LIMIT holds its bytes, the phase in which it holds or "all",
and the steps that a first attempt does before it holds: "1048576 forward 5". With a fourth word, "once", it
holds in the first attempt alone: host and device are one memory here, so no offload would make room.
MEMORY_PEAKS names a folder for the most of each phase after those steps.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections import defaultdict
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

    limit, only, begin, *once = os.environ.get("MEMORY_LIMIT", "0 none 0").split()
    is_first = not any("/recovery-" in word for word in sys.orig_argv)
    most, after = int(limit), int(begin) if is_first else 0

    class LimitedMemory(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}
            self.total = 0
            self.peaks: dict[str, int] = defaultdict(int)

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
            if rank is not None and rank.step < after:
                return
            self.peaks[phase] = max(self.peaks[phase], self.total)
            is_held = only in ("all", phase) and (is_first or not once)
            if is_held and self.total > most:
                live = (self.total - num_bytes) / _MIB
                asked, free = num_bytes / _MIB, max(0, most - self.total + num_bytes) / _MIB
                message = _WORDS.format(asked=asked, limit=most / _MIB, free=free, live=live)
                raise torch.OutOfMemoryError(message)

    mode = LimitedMemory()
    mode.__enter__()
    if "MEMORY_PEAKS" in os.environ:
        path, end = Path(os.environ["MEMORY_PEAKS"]) / f"rank{os.environ.get('RANK', 0)}.json", observe.end

        def write_and_end() -> None:
            path.write_text(json.dumps(mode.peaks), encoding="utf-8")
            end()

        observe.end = write_and_end


def _is_rank() -> bool:
    """Return True if this process was started to be a rank, not to launch one."""
    words = sys.orig_argv
    return "-m" in words and words[words.index("-m") + 1] == "zerofit.training.runner"


if _is_rank():
    from zerofit.scripts.on_import import when_imported

    when_imported("torch", limit_memory)
