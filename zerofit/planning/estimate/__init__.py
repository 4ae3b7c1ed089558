"""Memory and time of a strategy, from facts and an allocation log: no torch, no files, no clock."""
