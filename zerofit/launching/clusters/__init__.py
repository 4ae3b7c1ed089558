"""Runs on a cluster's nodes: submitted to Slurm, Kubernetes or SkyPilot, and what happens on each node."""
