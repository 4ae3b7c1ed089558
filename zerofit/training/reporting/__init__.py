"""What a rank tells the launcher: its state, memory, log and record."""
