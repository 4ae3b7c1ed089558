"""One real rank under torchrun: measures its cases, and rank 0 writes a line of JSON for each.

Usage: torchrun --nproc_per_node N real.py OUTPUT KEY...
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
from sharded.cases import CASES, STEPS, Case
from sharded.models import make_inputs, make_model
from zerofit.core.upstream.fsdp2 import (
    classes_to_wrap,
    host_copies,
    local_tensor,
    offload_mode,
    whole_state_dict,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIP = 1.0


class Tracker(TorchDispatchMode):
    """Counts the bytes of live tensors, those on the host left out, and their peak in each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peaks: dict[str, int] = {}
        self._phase = "load"
        self._sizes: dict[int, int] = {}
        self._on_host: set[int] = set()
        self._is_host = False

    def phase(self, name: str) -> None:
        """Begin a phase; one may begin more than once."""
        gc.collect()
        self._phase = name
        self._note(0)

    def _note(self, change: int) -> None:
        self.live += change
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.live)

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Count nothing that is made inside."""
        before, self._is_host = self._is_host, True
        try:
            yield
        finally:
            self._is_host = before

    def see(self, tensor: torch.Tensor) -> None:
        """Count a tensor that is not known."""
        storage = local_tensor(getattr(tensor, "elem", tensor)).untyped_storage()  # of an async collective
        key, size = storage._cdata, storage.nbytes()
        if key in self._on_host:
            return
        if key not in self._sizes and self._is_host:
            self._on_host.add(key)
            weakref.finalize(storage, self._on_host.discard, key)
            return
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._died, key)
        self.resized(key, size)

    def resized(self, key: int, size: int) -> None:
        """Count the new size of a storage that is known."""
        if key in self._sizes and size != self._sizes[key]:
            change, self._sizes[key] = size - self._sizes[key], size
            self._note(change)

    def _died(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return out


@contextlib.contextmanager
def watching_resizes(tracker: Tracker) -> Iterator[None]:
    """Tell a tracker of storages that FSDP2 empties and fills."""
    original = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        changed = original(storage, size)
        tracker.resized(storage._cdata, int(size))
        return changed

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def allow_on_cpu() -> None:
    """Make accelerate enter FSDP on CPU ranks, which it does on accelerators alone."""
    from accelerate import state
    from accelerate.utils import DistributedType

    original = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = init


def accelerator_of(case: Case, model: Any) -> Any:
    """Return an Accelerator for a case's model, in a process without another."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._shared_state.pop("distributed_type", None)
    PartialState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=case.reshard,
        cpu_offload=case.offload,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=classes_to_wrap(model),
        cpu_ram_efficient_loading=False,
    )
    parallelism = None
    if case.copies > 1:
        parallelism = ParallelismConfig(
            dp_replicate_size=case.copies, dp_shard_size=case.num_ranks // case.copies
        )
    return Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        mixed_precision="no" if case.precision == "fp16" else case.precision,
        parallelism_config=parallelism,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=case.accumulation, sync_each_batch=case.syncs_each_batch
        ),
    )


def measure(case: Case) -> dict[str, Any]:
    """Return the peaks of a case on this rank, in bytes."""
    model = make_model(case)
    accelerator = accelerator_of(case, model)
    if case.precision == "fp16":  # without GradScaler, which needs a GPU
        accelerator.state.fsdp_plugin.set_mixed_precision("fp16")
        accelerator.state._mixed_precision = "fp16"
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    tracker, host = Tracker(), list[Any]()
    copies = offload_mode(host, tracker.on_host) if case.offload else contextlib.nullcontext()
    with copies, watching_resizes(tracker):
        model, optimizer = accelerator.prepare(model, optimizer)
        with tracker.on_host() if case.offload else contextlib.nullcontext():
            for parameter in model.parameters():
                tracker.see(parameter)
        for buffer in model.buffers():
            tracker.see(buffer)
        gc.collect()
        tracker.phase("rest")
        with tracker:
            _train(case, tracker, accelerator, model, optimizer)
            host.clear()
            tracker.phase("save")
            with host_copies(tracker.on_host):
                whole_state_dict(model)
    return {"peaks": tracker.peaks}


def _train(case: Case, tracker: Tracker, accelerator: Any, model: Any, optimizer: Any) -> None:
    for _ in range(STEPS):
        for _ in range(case.accumulation):
            with accelerator.accumulate(model):
                tracker.phase("forward")
                loss = model(**make_inputs(case)).loss
                tracker.phase("backward")
                _backward(case, accelerator, loss)
                del loss
                if not accelerator.sync_gradients:
                    continue
                tracker.phase("step")
                with tracker.on_host() if case.offload else contextlib.nullcontext():
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()


def _backward(case: Case, accelerator: Any, loss: torch.Tensor) -> None:
    """Run the backward pass; Tensor.backward would leave the mode in which offload copies."""
    if case.offload:
        loss = loss / case.accumulation
        ones = (torch.ones_like(loss),)
        _engine_run_backward((loss,), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        accelerator.backward(loss)


def main() -> None:
    """Measure the cases that the command line names."""
    output, *keys = sys.argv[1:]
    allow_on_cpu()
    wanted = {case.key: case for case in CASES}
    for key in keys:
        found = measure(wanted[key])
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, found)
        if torch.distributed.get_rank() == 0:
            with Path(output).open("a", encoding="utf-8") as file:
                print(json.dumps([key, [rank["peaks"] for rank in gathered]]), file=file)
        gc.collect()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
