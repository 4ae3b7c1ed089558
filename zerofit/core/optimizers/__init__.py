"""The one table of optimizers: names, memory, options, and what DeepSpeed and accelerate do with each."""
