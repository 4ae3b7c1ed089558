"""What happens to batches: their order, who shares them, and their split into micro-batches."""
