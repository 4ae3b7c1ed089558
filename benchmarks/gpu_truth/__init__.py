"""What zerofit predicts, measured on this machine: memory, many ranks on one GPU, regret, the ladder."""
