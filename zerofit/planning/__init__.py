"""From facts and estimates to the fastest strategy that fits, with reasons."""
