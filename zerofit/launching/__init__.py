"""Starts a run, watches it, stops it, records it."""
