"""The training step under DeepSpeed, and what a script may do with weights and gradients between steps."""
