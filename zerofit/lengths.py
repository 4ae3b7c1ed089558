"""Lengths: how many samples of a dataset have how many tokens."""
