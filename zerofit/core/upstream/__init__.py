"""Adapters to the libraries' private names and to differences between their supported releases."""
