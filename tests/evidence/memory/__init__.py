"""What the real DeepSpeed engine holds on each rank, phase by phase: the truth that the estimator is held to.

Real ranks over gloo train a small real model through accelerate, and every tensor storage is followed from
birth to death (track.py). One machine without a GPU stands for two memories (devices.py): each storage is
labelled device or host by what the engine asked for, and a move from one to the other copies, so that
defragmenting over the host, pinned copies and gathers from offloaded shards show up as a GPU would have them.

What a GPU has besides, and is left out here: the caching allocator's rounding and fragments, CUDA's and
NCCL's own memory, kernels' workspaces, and the lifetimes that `record_stream` adds. `pin_memory` copies, as
CUDA's does; the rounding of pinned blocks up to a power of two is not applied. Forward and backward run the
CPU's kernels with eager attention. NCCL needs none of the copies that gloo makes, and those are hidden
(collectives.py).

`make evidence` measures anew what the versions, the cases or the files here changed, and writes
measured/engine_memory.json; `memory.results.load_measured()` reads it.
"""
