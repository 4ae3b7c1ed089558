"""Training scripts: what their source says, and what they do up to their first step."""
