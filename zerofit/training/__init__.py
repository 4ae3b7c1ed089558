"""Code that runs inside the training processes: hooks on accelerate, Trainer and DeepSpeed."""
