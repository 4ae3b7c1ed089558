"""Planning of inference: which layout holds a model, its cache and its activations, with the numbers why."""
