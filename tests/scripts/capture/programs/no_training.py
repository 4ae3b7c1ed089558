"""Trains nothing."""

print("the sum is", sum(range(10)))
