"""Allocations of plain PyTorch and of each ZeRO stage of DeepSpeed during a run."""
