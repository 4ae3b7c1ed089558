"""Configuration files: parsed with the position of each value, checked against schemas, written."""
