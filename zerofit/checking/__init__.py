"""Compatibility of a run's configuration: rules, and the engine that applies them."""
