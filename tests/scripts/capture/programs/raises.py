"""Fails before its training."""


def load(path):
    raise ValueError(f"no column 'text' in {path}")


load("train.csv")
