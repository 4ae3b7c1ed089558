"""Starts, watches, stops and records runs; recovery, clusters, tuning and explanations."""
