"""Models: found by name, described, traced and changed."""
