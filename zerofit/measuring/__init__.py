"""Measures memory strategies on this machine (the ladder), each in a process of its own."""
