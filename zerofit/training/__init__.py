"""Code that runs inside the training processes."""
