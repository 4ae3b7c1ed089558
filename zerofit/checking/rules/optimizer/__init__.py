"""Rules on optimizers, and the behaviour of each under ZeRO and offload."""
