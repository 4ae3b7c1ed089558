"""Configuration files: read with the place of each value, checked against schemas, written."""
