"""What data costs and how to batch it: samplers, collators, labels, packing, loading, reports of lengths."""
