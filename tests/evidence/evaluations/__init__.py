"""What real ranks hold while their Trainer evaluates, under FSDP2 and DeepSpeed, beside the plan's estimate.

Two CPU ranks train a small Llama by transformers' Trainer, which evaluates in the middle of training and
after it. Their live tensors are followed with the trackers of `sharded` (FSDP2) and `memory` (DeepSpeed),
which tell device and host apart. Predictions are gathered by accelerate's code for NCCL, without the copies
that it makes for gloo. FSDP2 is run as `zerofit launch` runs it, which releases weights after each forward
pass without gradients.
"""
