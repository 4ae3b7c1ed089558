"""The ladder of memory strategies, measured: each rung in a process of its own."""
