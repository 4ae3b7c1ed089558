"""A transformer's allocations and costs by formula, for `plan --fast`."""
