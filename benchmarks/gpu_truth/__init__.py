"""Measures on this machine what zerofit predicts: memory, rank 0 of many, regret, the ladder."""
