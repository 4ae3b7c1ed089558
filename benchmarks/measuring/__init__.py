"""Measures memory strategies on this machine (the ladder), each in a separate process."""
