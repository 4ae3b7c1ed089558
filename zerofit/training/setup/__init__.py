"""What is done when the Accelerator, the Trainer, the model and the optimizer are made and prepared."""
