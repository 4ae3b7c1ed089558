"""Output formats of the command line: tables, JSON, SARIF, plots."""
