"""Runs on clusters: submission to Slurm, Kubernetes or SkyPilot, and the launcher on each node."""
