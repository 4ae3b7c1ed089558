"""Text of JSON, HJSON and YAML files to documents with positions, and edits back to text."""
