"""Combines the layers of a run, files, flags and script, into the Situation that rules check."""
