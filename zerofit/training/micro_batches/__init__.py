"""Splits the training forward pass into micro-batches, transparently for the script."""
