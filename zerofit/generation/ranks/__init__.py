"""Synchronizes the ranks of a generation: a call that all must make, values and errors that all share."""
