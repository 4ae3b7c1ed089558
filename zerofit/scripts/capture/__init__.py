"""Runs a script up to where its training would begin, and records what it would train."""
