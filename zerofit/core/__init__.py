"""Shared values: Strategy, Plan, Overrides, facts, errors, units. No I/O."""
