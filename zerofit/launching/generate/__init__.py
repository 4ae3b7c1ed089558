"""`zerofit generate`: checks its inputs, plans, and starts the ranks."""
