"""The training step: loss, backward pass, accumulation, clipping, optimizer step and schedulers."""
