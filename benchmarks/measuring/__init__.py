"""The trainee of the GPU harness: measures memory strategies, each in a separate process."""
