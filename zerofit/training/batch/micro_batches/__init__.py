"""Splits training forward passes into micro-batches, transparently for the script."""
