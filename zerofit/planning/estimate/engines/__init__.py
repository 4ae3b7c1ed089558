"""What plain PyTorch and each ZeRO stage of DeepSpeed allocate during a step."""
