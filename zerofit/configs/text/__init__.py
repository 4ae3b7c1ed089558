"""Text of JSON, HJSON and YAML files to documents with a place for everything, and edits back to text."""
