"""Splits the training forward pass into micro-batches, behind the script's back."""
