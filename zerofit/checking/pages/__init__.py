"""The pages of docs/reference that are rendered from rules and from what was measured."""
