"""Changes to DeepSpeed's engine and to models under it, inside the training process."""
