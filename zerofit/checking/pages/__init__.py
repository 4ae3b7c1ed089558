"""Renders the pages of docs/reference from rules and measurements."""
