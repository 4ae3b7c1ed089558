"""Training scripts: facts from their source, and from running them up to their first step."""
