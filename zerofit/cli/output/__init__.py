"""Plans as text: one file a format."""
