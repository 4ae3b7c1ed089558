"""The evidence harness: rules' examples as real runs, what the ranks did, and what that says of a rule."""
