"""What is frozen, in words: patterns and names of groups to the names of parameters."""
