"""What real FSDP2 holds on each rank, phase by phase: the truth that its trace on fake tensors is held to.

Real ranks over gloo train a small real model through accelerate, and every tensor storage is followed from
birth to death (real.py). The same model runs on fake tensors as rank 0 (estimated.py), with the CPU's kernels
in place of CUDA's, as the ranks have them. Offloaded shards and gradients are host memory on both sides, and
the copies between host and device are made, which torch leaves out on a CPU alone. Linear layers in nf4 are
zerofit's stand-ins on both sides: the format of their storage is what FSDP2 sees.

`benchmarks/fsdp2_memory.py` measures, and writes measured/fsdp2_memory.json.
"""
