"""Changes to a live model, in place: what the tracer, the training process and the ladder all use."""
