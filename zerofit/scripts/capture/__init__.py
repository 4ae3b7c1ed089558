"""Runs a script up to where its training would begin, and says what it would train."""
