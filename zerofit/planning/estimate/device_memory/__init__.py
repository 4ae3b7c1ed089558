"""GPU memory of a step: the allocator's replay of what a trace allocates, and what lies outside it."""
