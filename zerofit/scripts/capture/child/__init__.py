"""The child process of a capture: runs a script up to where its training would begin."""
