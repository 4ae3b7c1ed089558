"""Rules about a script's source."""
