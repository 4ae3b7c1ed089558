"""Compatibility rules for a run's configuration, and the engine that applies them."""
