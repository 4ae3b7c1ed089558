"""Saving and resuming: checkpoints, whole weights, and the checkpoint before a node is taken away."""
