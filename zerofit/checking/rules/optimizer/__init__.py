"""Rules about optimizers, and what each does under ZeRO and offload."""
