"""Changes to transformers' Trainer inside the training process."""
