"""In-place changes of a model, shared by the tracer and the training process."""
