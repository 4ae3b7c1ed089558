"""Shared values: Strategy, Plan, Request, facts, errors, units. No I/O."""
