"""The capture: a child process that runs a script up to the moment at which its training would begin."""
