"""In-place changes of a model, shared by the tracer, the training process and the ladder."""
